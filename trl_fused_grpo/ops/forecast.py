"""The gradients that the caller of the fused head expects for its rows."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class RowGroups:
    """Groups of rows whose gradients depend on each other's log-probabilities, as the tokens of a sequence."""

    ends: list[int]  # the row behind the last of each. They follow one another from row 0 to `Forecast.grad_rows`
    # Whether all rows of a group receive the same gradient, of the log-probability alone. A group's gradients can then
    # be built before that number is known, and be multiplied by it afterwards
    have_equal_grads: bool = False


class Forecast(Protocol):
    """
    Says which gradient of the loss each row will receive. Wrong values cost time; the gradients stay right.

    `grad_rows` is a number of rows: those from there on are expected to receive no gradient. Where the gradient of a
    row depends on other rows, there is an attribute `groups`, see [`groups_of`].
    """

    @property
    def grad_rows(self) -> int: ...

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """
        Return the gradients with respect to the log-probabilities `[n]` and entropies (`[n]` or `None`) of some rows.

        They may differ from the true ones by one factor, common to all rows.

        Args:
            rows (`slice`): the rows. Where there are groups, these are whole groups.
            logps (`Tensor`): their log-probabilities `[n]`, nats, detached.
            entropies (`Tensor`, *optional*): their entropies `[n]`, nats, detached.
        """
        ...


def groups_of(forecast: Forecast | None) -> RowGroups | None:
    """The groups of a forecast's rows, or `None` where a row's gradient depends on no other row."""
    return getattr(forecast, "groups", None)
