"""One sub-batch of a log-prob computation: the positions that are projected, and their results in place."""

from torch import Tensor, where

from trl_fused_grpo.loss.forecast import grad_rows_first
from trl_fused_grpo.ops.forecast import Forecast
from trl_fused_grpo.ops.linear_logps import FusedStats

from .logps_request import LogpsRequest, PerTokenLogps


class SubBatch:
    """
    Selects positions of a sub-batch, and puts what is computed for them back in place.

    Args:
        logps_request ([`LogpsRequest`]): for the whole batch.
        rows (`Tensor`): `[b]`: which of its sequences these are.

    Attributes:
        selected (`Tensor`): `[b, T]`, bool: the positions that are projected.
        positions (`Tensor`): `[N]`: the same, flat in `[b, T]`. Those that need no gradient come last.
        forecast ([`Forecast`], *optional*): the gradients expected at `positions`.
    """

    def __init__(self, logps_request: LogpsRequest, rows: Tensor):
        self.selected = logps_request.mask[rows].bool()  # [b, T]
        self.forecast: Forecast | None = None
        self._fill = None if logps_request.fill is None else logps_request.fill[rows]  # [b, T]
        self._skipped: Tensor | None = None  # [b, T], bool: positions of sequences that are left out of the model
        self._leaves_out = False  # any
        forecast = logps_request.forecast
        if forecast is None:
            self.positions, _ = grad_rows_first(self.selected, None)
            return
        needs_grad = self.selected & forecast.needs_grad[rows]
        if logps_request.skippable is not None:
            kept = self._kept(needs_grad, logps_request.skippable[rows])  # [b, 1]
            self._skipped, self.selected = self.selected & ~kept, self.selected & kept
            self._leaves_out = bool(self._skipped.any())
        # What needs no gradient comes last, so that it never enters a matmul of the backward
        self.positions, grad_rows = grad_rows_first(self.selected, needs_grad)
        width = self.selected.shape[1]
        in_batch = rows[self.positions // width] * width + self.positions % width  # [N], flat in [B, T]
        self.forecast = forecast.at(in_batch, grad_rows)

    def _kept(self, needs_grad: Tensor, skippable: Tensor) -> Tensor:
        """
        Which sequences `[b, 1]` are not left out. Where none would be, the first with a token is not: metrics are then
        of something, and [`layout.packed`] runs one anyway.
        """
        kept, has_tokens = needs_grad.any(1) | ~skippable, self.selected.any(1)
        first = has_tokens & (has_tokens.cumsum(0) == 1)
        return (kept | first & ~(kept & has_tokens).any()).unsqueeze(1)

    def in_place(self, results: tuple[Tensor, ...], has_entropies: bool, stats: FusedStats) -> PerTokenLogps:
        """
        Put results back to where they belong in `[b, T]`.

        Args:
            results (`tuple[Tensor]`):
                What the model returned: log-probabilities `[N]`, then entropies `[N]` and the auxiliary loss where they
                were asked for.
            has_entropies (`bool`): whether there are entropies.
            stats ([`FusedStats`]): of the call.
        """
        values, stats.leaves_out = iter(results), self._leaves_out
        logps = self._scatter(next(values), self._fill)
        entropies = None
        if has_entropies:
            projected = next(values)  # [N]
            entropies = self._scatter(projected, None)
            if self._skipped is not None:
                # The mean over the mask is then the mean over the sequences that went through the model
                entropies = where(self._skipped, projected.detach().mean(), entropies)
        left_out = None if self._skipped is None else self._skipped.any(1)
        return PerTokenLogps(logps, entropies, next(values, None), [stats], left_out)

    def _scatter(self, values: Tensor, fill: Tensor | None) -> Tensor:
        shape = self.selected.shape
        base = values.new_zeros(shape) if fill is None else fill.to(values.dtype)
        return base.flatten().index_put((self.positions,), values).view(shape)
