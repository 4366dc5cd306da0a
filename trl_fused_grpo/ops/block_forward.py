"""The forward of a block of rows: logits, what is computed of them, and the gradients that follow from a forecast."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .chunked_linear import ChunkedLinear
from .precomputed_grads import PrecomputedGrads
from .row_blocks import RowBlock


# From rows, their log-probabilities and entropies to the gradients that the forward assumes for them
AssumedGrads = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class RowValues(NamedTuple):
    """Log-probability, log-sum-exp and entropy of each row, in nats."""

    logps: Tensor  # [N]
    lse: Tensor  # [N]
    entropies: Tensor | None  # [N]

    @classmethod
    def empty(cls, linear: ChunkedLinear, with_entropies: bool) -> "RowValues":
        """Uninitialised numbers for all rows."""
        per_row = linear.empty_per_row
        return cls(per_row(), per_row(), per_row() if with_entropies else None)

    def at(self, rows: slice) -> "RowValues":
        """Views of the numbers of some rows."""
        return RowValues(self.logps[rows], self.lse[rows], None if self.entropies is None else self.entropies[rows])


def run_block(
    block: RowBlock,  # the rows
    linear: ChunkedLinear,  # all rows and the head
    values: RowValues,  # of all rows, filled in
    precomputed: PrecomputedGrads | None,  # takes the assumed gradients; without it there are none
    assumed_grads: AssumedGrads,  # tells them
) -> None:
    """Fill in the values of a block's rows, and add the gradients that are assumed for them."""
    if precomputed is not None and block.assumes == "equal":
        _run_equal_block(block, linear, values, precomputed, assumed_grads)
        return
    for rows in block.parts:
        logits, part = _compute_part(rows, linear, values)  # [n, V], [n] each
        if precomputed is not None and block.assumes != "none":
            row_grads = precomputed.record(rows, *assumed_grads(rows, part.logps, part.entropies))  # [n]
            precomputed.accumulator.add(rows, logits, part.lse, part.entropies, *row_grads)


def _run_equal_block(
    block: RowBlock,
    linear: ChunkedLinear,
    values: RowValues,
    precomputed: PrecomputedGrads,
    assumed_grads: AssumedGrads,
) -> None:
    """The same for a block whose rows receive one gradient: from a gradient of one, multiplied afterwards."""
    group = precomputed.accumulator.of_group(block.rows)
    for rows in block.parts:
        logits, part = _compute_part(rows, linear, values)  # [n, V], [n] each
        group.add(rows, logits, part.lse, None, torch.ones_like(part.logps), None)
    whole = values.at(block.rows)
    grad_logps, _ = assumed_grads(block.rows, whole.logps, whole.entropies)  # [n], all alike
    grad_logps, _ = precomputed.record(block.rows, grad_logps[:1].expand_as(grad_logps), None)
    precomputed.accumulator.add_group(group, block.rows, grad_logps[0])


def _compute_part(rows: slice, linear: ChunkedLinear, values: RowValues) -> tuple[Tensor, RowValues]:
    """Fill in the values of some rows; return these and the rows' logits `[n, V]`, which the next call overwrites."""
    logits, part = linear.compute_logits(rows), values.at(rows)  # [n, V], [n] each
    linear.kernels.logprob_forward(logits, linear.targets[rows], linear.transform, part.logps, part.lse, part.entropies)
    return logits, part
