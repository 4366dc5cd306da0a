"""What the forward precomputed of each row's gradient, against what the backward finds due."""

from typing import NamedTuple

import torch
from torch import Tensor

from .chunked_linear import GradAccumulator


# A row counts as forecast when its gradient is within this of the forecast, relative to its own size: some roundings
# of float32, and far below the 1e-5 that parity allows.
FORECAST_RTOL = 4e-6
# Where a row's terms cancel, policy against KL, their rounding remains: it is measured by the rows' usual size
FORECAST_ATOL = 5e-7


class ResidualGrads(NamedTuple):
    """The part of each row's gradient that has not gone into the parameters' gradients yet."""

    logps: Tensor  # [N]
    entropies: Tensor | None  # [N]

    def rows(self) -> Tensor:
        """Indices of the rows with something left, NaN included, `[M]`. Synchronises the device once."""
        open_rows = self.logps != 0
        if self.entropies is not None:
            open_rows |= self.entropies != 0
        return open_rows.nonzero().squeeze(-1)


class PrecomputedGrads:
    """
    What the forward assumed each row's gradient to be, and the gradients it built from that.

    Args:
        gradients (`GradAccumulator`): of hidden states and head.
        of_all_rows (`bool`): whether no row is left out as dead.
    """

    def __init__(self, gradients: GradAccumulator, of_all_rows: bool):
        self.gradients, self.of_all_rows = gradients, of_all_rows
        self.logps = gradients.linear.new_rows().zero_()  # [N]
        self.entropies: Tensor | None = None  # [N]

    def record(self, rows: slice, grad_logps: Tensor, grad_entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write down what the gradient of `rows` is assumed to be, `[n]` each, and return it as it stands there."""
        self.logps[rows] = grad_logps
        if grad_entropies is not None:
            if self.entropies is None:
                self.entropies = torch.zeros_like(self.logps)
            self.entropies[rows] = grad_entropies
        return self.logps[rows], None if self.entropies is None else self.entropies[rows]

    def resolve_unit_grads(self, grad_logps: Tensor, grad_entropies: Tensor | None) -> ResidualGrads | None:
        """
        Multiply each row's unit gradient by its true one `[N]`. Rows thought dead and any entropy gradient remain.
        """
        self.gradients.scale_rows(grad_logps)
        if self.of_all_rows and grad_entropies is None:
            return None  # without asking the device
        return ResidualGrads(torch.where(self.logps == 0, grad_logps, 0.0), grad_entropies)

    def resolve_forecast_grads(self, grad_logps: Tensor, grad_entropies: Tensor | None) -> ResidualGrads | None:
        """
        Scale what was precomputed to the true gradient `[N]`. The two differ by a factor (gradient accumulation, a loss
        scaler, a distributed average), estimated here; rows that differ by more remain with the difference.
        """
        factor = _common_factor(grad_logps, self.logps)
        true, paid = [grad_logps], [factor * self.logps]
        if grad_entropies is not None or self.entropies is not None:
            zeros = torch.zeros_like(grad_logps)
            true.append(zeros if grad_entropies is None else grad_entropies.to(zeros.dtype))
            paid.append(zeros if self.entropies is None else factor * self.entropies)
        true, paid = torch.stack(true), torch.stack(paid)  # [1 or 2, N]

        usual = true.square().mean(-1, keepdim=True).sqrt()
        usual = torch.where(usual.isfinite(), usual, 0.0)
        tolerance = FORECAST_RTOL * true.abs() + FORECAST_ATOL * usual
        wrong = ~((true - paid).abs() <= tolerance).all(0)  # [N]; NaN is wrong
        # Correcting by a difference loses digits when more was wrongly paid than is due: then start from nothing
        keep = torch.linalg.vector_norm(paid * wrong) <= torch.linalg.vector_norm(true)
        keep, factor, any_wrong = torch.stack([keep.double(), factor.double(), wrong.any().double()]).tolist()
        if keep:
            self.gradients.scale(factor)
            if not any_wrong:
                return None
            left = torch.where(wrong, true - paid, 0.0)
        else:
            self.gradients.reset()
            left = true
        return ResidualGrads(left[0], left[1] if len(left) == 2 else None)


def _common_factor(true: Tensor, expected: Tensor) -> Tensor:
    """Median of `true / expected` over the rows where neither is zero, 1 where there is none; a scalar tensor."""
    known = (true != 0) & (expected != 0)
    factor = torch.where(known, true / expected, float("nan")).nanmedian() if len(true) else true.new_tensor(1.0)
    return torch.where(factor.isfinite(), factor, 1.0)
