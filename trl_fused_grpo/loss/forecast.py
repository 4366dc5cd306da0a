"""From a GRPO objective and a micro-batch to the gradient each projected row is expected to receive."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .batch import GRPOBatch
from .objective import GRPOObjective, kl_loss, policy_loss, token_terms
from .reduction import entropy_weights, token_weights


@dataclass(frozen=True)
class GradientTerms:
    """
    What the gradients of log-probabilities and entropies follow from: one number per position `[B, T]` or row `[N]`.

    `on_policy` is the policy term's gradient where the policy is the old one; else `advantages`, `old_logps` and
    `scale` give it from the log-probability. `kl_weights` and `entropy_grads` are `None` where there is no such term.
    """

    scale: Tensor
    on_policy: Tensor | None
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    kl_weights: Tensor | None
    entropy_grads: Tensor | None

    def at(self, index: Tensor) -> "GradientTerms":
        """Pick the flat positions `index` `[N]`."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            picked[field.name] = None if values is None else values.reshape(-1).index_select(0, index)
        return GradientTerms(**picked)

    def scaled(self, factor: Tensor) -> "GradientTerms":
        """The terms of `factor` times the gradients, a scalar tensor."""
        names = ("scale", "on_policy", "kl_weights", "entropy_grads")
        linear = {name: getattr(self, name) for name in names}
        return replace(self, **{name: values * factor for name, values in linear.items() if values is not None})

    @classmethod
    def joined(cls, parts: list["GradientTerms"]) -> "GradientTerms":
        """The terms of several micro-batches, one after the other."""
        joined: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            joined[field.name] = None if values[0] is None else torch.cat(values)
        return cls(**joined)


@dataclass(frozen=True)
class BatchForecast:
    """
    The forecast before rows are chosen.

    Args:
        objective ([`GRPOObjective`]): what is minimised.
        needs_grad (`Tensor`): `[B, T]`: the positions that can receive a gradient.
        terms ([`GradientTerms`]): what their gradients follow from, times `unit`.
        unit (`Tensor`): a power of two, a scalar.
    """

    objective: GRPOObjective
    needs_grad: Tensor
    terms: GradientTerms
    unit: Tensor

    @classmethod
    def joined(cls, parts: list["BatchForecast"]) -> "BatchForecast":
        """The forecast of several micro-batches of one accumulation window, one after the other."""
        unit = torch.stack([part.unit for part in parts]).min()
        terms = [part.terms.scaled(unit / part.unit) for part in parts]
        return cls(
            parts[0].objective, torch.cat([part.needs_grad for part in parts]), GradientTerms.joined(terms), unit
        )

    def at(self, index: Tensor, grad_rows: int) -> "RowForecast":
        """Pick the rows at the flat positions `index` `[N]`, of which the first `grad_rows` are live."""
        return RowForecast(self.objective, grad_rows, self.terms.at(index))


@dataclass(frozen=True)
class RowForecast:
    """A [`Forecast`] of the rows in the order in which they are projected."""

    objective: GRPOObjective
    grad_rows: int
    terms: GradientTerms

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        terms = self.terms
        grad = torch.zeros_like(logps) if terms.on_policy is None else terms.on_policy[rows]
        if terms.on_policy is None or terms.kl_weights is not None:
            with torch.enable_grad():
                leaf = logps.detach().requires_grad_()
                grad = grad + torch.autograd.grad(self._loss(rows, leaf), leaf)[0]
        return grad, None if terms.entropy_grads is None else terms.entropy_grads[rows]

    def _loss(self, rows: slice, logps: Tensor) -> Tensor:
        """The terms whose gradient depends on the log-probability, a scalar."""
        terms = self.terms
        log_ratio = logps - (logps.detach() if terms.old_logps is None else terms.old_logps[rows])
        total = logps.new_zeros(())
        if terms.on_policy is None:
            loss = policy_loss(self.objective, terms.advantages[rows], logps, log_ratio)
            total = total + (loss * terms.scale[rows]).sum()
        if terms.kl_weights is not None and terms.ref_logps is not None:
            kl = kl_loss(self.objective, terms.ref_logps[rows], logps, log_ratio)
            total = total + (kl * terms.kl_weights[rows]).sum()
        return total


def forecast(objective: GRPOObjective, batch: GRPOBatch) -> BatchForecast | None:
    """
    Forecast the gradient of every position of a micro-batch, up to one common factor.

    Returns `None` where no forecast exists ([`GRPOObjective.is_tokenwise`]).
    """
    is_on_policy = batch.old_per_token_logps is None
    if not objective.is_tokenwise(has_old_logps=not is_on_policy):
        return None
    weights = token_weights(objective, batch)  # [B, T]
    # Only proportions matter: put the largest weight near one, so that float16 gradients do not underflow. Scaled by a
    # power of two the forecast rounds as the loss does: terms that nearly cancel leave the very same difference
    largest = weights.max().clamp(min=torch.finfo(torch.float32).tiny)
    unit = largest.frexp().mantissa / largest
    scale = weights * unit
    kl_weights = scale * objective.beta if objective.beta != 0.0 and batch.ref_per_token_logps is not None else None
    entropy_grads = entropy_weights(objective, batch) * unit if objective.entropy_coef != 0.0 else None

    on_policy = None
    if is_on_policy:
        on_policy = _on_policy_gradient(objective, batch, scale)
        needs_grad = on_policy != 0
    else:
        if batch.importance_sampling_ratio is not None:
            scale = scale * batch.importance_sampling_ratio
        needs_grad = (scale != 0) & (batch.advantages != 0)
    for term in (kl_weights, entropy_grads):
        needs_grad = needs_grad if term is None else needs_grad | (term != 0)
    terms = GradientTerms(
        scale=scale,
        on_policy=on_policy,
        advantages=batch.advantages.float().expand_as(weights),
        old_logps=batch.old_per_token_logps,
        ref_logps=None if kl_weights is None else batch.ref_per_token_logps,
        kl_weights=kl_weights,
        entropy_grads=entropy_grads,
    )
    return BatchForecast(objective, needs_grad, terms, unit)


def _on_policy_gradient(objective: GRPOObjective, batch: GRPOBatch, weights: Tensor) -> Tensor:
    """Gradient of the policy term `[B, T]` at ratio one, where it does not depend on the log-probabilities."""
    with torch.enable_grad():
        logps = torch.zeros_like(weights).requires_grad_()
        terms = token_terms(replace(objective, beta=0.0), batch, logps)
        return torch.autograd.grad((terms.loss * weights).sum(), logps)[0]


def grad_rows_first(counted: Tensor, needs_grad: Tensor | None) -> tuple[Tensor, int]:
    """
    Flat positions `[N]` of the rows that count, those that can receive a gradient first, and how many these are.

    Args:
        counted (`Tensor`): `[B, T]`, bool.
        needs_grad (`Tensor`, *optional*): `[B, T]`, bool; everything that counts without it.
    """
    if needs_grad is None:
        positions = counted.flatten().nonzero().squeeze(-1)
        return positions, len(positions)
    groups = [rows.flatten().nonzero().squeeze(-1) for rows in (counted & needs_grad, counted & ~needs_grad)]
    return torch.cat(groups), len(groups[0])
