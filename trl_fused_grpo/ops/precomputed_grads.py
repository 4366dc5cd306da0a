"""
Compares the row gradients assumed in forward with those received in backward.

A row's gradient is that of the loss with respect to its log-probability and entropy. The forward assumes these numbers
and accumulates the gradients of hidden states and head from them. The backward scales what is accumulated and returns
the residual: what is missing for rows whose gradient was assumed wrongly. The caller adds that with logits computed
anew.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .chunked_linear import GradAccumulator


# A row's gradient equals the assumed one when they differ by no more than this, relative to its size: a few roundings
# of float32, and far below the 1e-5 that parity allows.
FORECAST_RTOL = 4e-6
# Where policy and KL term cancel, their rounding errors remain. This allows for them, relative to the rows' root mean
# square
FORECAST_ATOL = 5e-7


class ResidualGrads(NamedTuple):
    """The part of each row's gradient that is not in the accumulated gradients yet."""

    logps: Tensor  # [N]
    entropies: Tensor | None  # [N]

    def rows(self) -> Tensor:
        """Indices `[M]` of the rows whose residual is not zero; NaN is not zero. Synchronises the device once."""
        is_nonzero = self.logps != 0
        if self.entropies is not None:
            is_nonzero |= self.entropies != 0
        return is_nonzero.nonzero().squeeze(-1)


class PrecomputedGrads:
    """The row gradients that the forward assumed, and the gradients that it accumulated from them."""

    def __init__(self, accumulator: GradAccumulator, includes_all_rows: bool):
        self.accumulator, self.includes_all_rows = accumulator, includes_all_rows
        self.logps = accumulator.linear.empty_per_row().zero_()  # [N]
        self.entropies: Tensor | None = None  # [N]

    def record(self, rows: slice, grad_logps: Tensor, grad_entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Store the assumed gradients of `rows` `[n]` and return them in the dtype of the store."""
        self.logps[rows] = grad_logps
        if grad_entropies is not None:
            if self.entropies is None:
                self.entropies = torch.zeros_like(self.logps)
            self.entropies[rows] = grad_entropies
        return self.logps[rows], None if self.entropies is None else self.entropies[rows]

    def resolve_unit_grads(self, grad_logps: Tensor, grad_entropies: Tensor | None) -> ResidualGrads | None:
        """
        Multiply each row's hidden gradient, made from a gradient of one, by the true gradient `[N]`.

        Rows that were left out and gradients of entropies remain as the residual.
        """
        self.accumulator.scale(grad_logps.unsqueeze(-1))
        if self.includes_all_rows and grad_entropies is None:
            return None  # without a synchronisation of the device
        return ResidualGrads(torch.where(self.logps == 0, grad_logps, 0.0), grad_entropies)

    def resolve_forecast_grads(self, grad_logps: Tensor, grad_entropies: Tensor | None) -> ResidualGrads | None:
        """
        Scale the accumulated gradients by the common factor of the true row gradients `[N]` and the assumed ones.

        Gradient accumulation, a loss scaler or an average over processes make such a factor. Rows that differ by more
        than it remain with their difference as the residual. Synchronises the device once.
        """
        factor = _common_factor(grad_logps, self.logps)
        true, assumed = self._stack(factor, grad_logps, grad_entropies)  # [1 or 2, N]
        wrong = _rows_that_differ(true, assumed)  # [N]
        # A correction by differences loses digits when the wrong part exceeds the true gradient: then start from zero
        keep = torch.linalg.vector_norm(assumed * wrong) <= torch.linalg.vector_norm(true)
        keep, factor, any_wrong = torch.stack([keep.double(), factor.double(), wrong.any().double()]).tolist()
        if keep:
            if factor != 1.0:
                self.accumulator.scale(factor)
            if not any_wrong:
                return None
            residual = torch.where(wrong, true - assumed, 0.0)
        else:
            self.accumulator.reset()
            residual = true
        return ResidualGrads(residual[0], residual[1] if len(residual) == 2 else None)

    def _stack(self, factor: Tensor, grad_logps: Tensor, grad_entropies: Tensor | None) -> tuple[Tensor, Tensor]:
        """True row gradients, and `factor` times the assumed ones: `[1, N]`, or `[2, N]` where entropies have any."""
        true, assumed = [grad_logps], [factor * self.logps]
        if grad_entropies is not None or self.entropies is not None:
            zeros = torch.zeros_like(grad_logps)
            true.append(zeros if grad_entropies is None else grad_entropies.to(zeros.dtype))
            assumed.append(zeros if self.entropies is None else factor * self.entropies)
        return torch.stack(true), torch.stack(assumed)


def _rows_that_differ(true: Tensor, assumed: Tensor) -> Tensor:
    """Mark the rows whose gradients `[1 or 2, N]` differ by more than rounding, `[N]`; NaN differs."""
    rms = true.square().mean(-1, keepdim=True).sqrt()
    rms = torch.where(rms.isfinite(), rms, 0.0)
    tolerance = FORECAST_RTOL * true.abs() + FORECAST_ATOL * rms
    return ~((true - assumed).abs() <= tolerance).all(0)


def _common_factor(true: Tensor, assumed: Tensor) -> Tensor:
    """Median of `true / assumed` over the rows where neither is zero, 1 where there is none; a scalar tensor."""
    known = (true != 0) & (assumed != 0)
    factor = torch.where(known, true / assumed, float("nan")).nanmedian() if len(true) else true.new_tensor(1.0)
    return torch.where(factor.isfinite(), factor, 1.0)
