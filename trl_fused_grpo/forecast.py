"""From a GRPO objective and a micro-batch to the gradient each projected row is expected to receive."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import (
    GRPOBatch,
    GRPOObjective,
    aggregation_weights,
    kl_derivative,
    policy_derivative,
    vespo_phi,
)


@dataclass(frozen=True)
class BatchForecast:
    """
    The forecast before rows are chosen: one entry per completion position, `[B, T]` each.

    `on_policy` is the gradient at ratio one, where the policy is the old one; else `advantages` and `old_logps` give it
    from the log-probability. `scale` multiplies both. `kl_weights` and `entropy_grads` are `None` where there is no such
    term. `live` marks the positions that can receive a gradient.
    """

    objective: GRPOObjective
    live: Tensor
    scale: Tensor
    on_policy: Tensor | None
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    kl_weights: Tensor | None
    entropy_grads: Tensor | None

    def at(self, index: Tensor, live_rows: int) -> "RowForecast":
        """Pick the rows at the flat positions `index` `[N]`, of which the first `live_rows` are live."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.reshape(-1).index_select(0, index)

        return RowForecast(
            self.objective,
            live_rows,
            *map(pick, (self.scale, self.on_policy, self.advantages, self.old_logps, self.ref_logps)),
            *map(pick, (self.kl_weights, self.entropy_grads)),
        )


@dataclass(frozen=True)
class RowForecast:
    """A [`Forecast`] of the rows in the order in which they are projected; every tensor is `[N]`."""

    objective: GRPOObjective
    live_rows: int
    scale: Tensor
    on_policy: Tensor | None
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    kl_weights: Tensor | None
    entropy_grads: Tensor | None

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        log_ratio = None
        if self.on_policy is not None:
            grad = self.on_policy[rows]
        else:
            log_ratio = logps - self.old_logps[rows]
            grad = policy_derivative(self.objective, self.advantages[rows], log_ratio, None) * self.scale[rows]
        if self.kl_weights is not None:
            log_ratio = torch.zeros_like(logps) if log_ratio is None else log_ratio
            slope = kl_derivative(self.objective, self.ref_logps[rows] - logps, log_ratio)
            grad = grad + self.kl_weights[rows] * slope
        return grad, None if self.entropy_grads is None else self.entropy_grads[rows]


def forecast(objective: GRPOObjective, batch: GRPOBatch) -> BatchForecast | None:
    """
    Forecast the gradient of every position of a micro-batch, up to one common factor.

    Returns `None` where no forecast exists ([`GRPOObjective.is_tokenwise`]).
    """
    on_policy = batch.old_per_token_logps is None
    if not objective.is_tokenwise(has_old_logps=not on_policy):
        return None
    weights = aggregation_weights(objective, batch)  # [B, T]
    advantages = batch.advantages.float().expand_as(weights)  # [B, T]
    scale = weights
    if batch.importance_sampling_ratio is not None and objective.loss_type != "vespo":
        scale = weights * batch.importance_sampling_ratio
    if objective.importance_sampling_level == "sequence":
        # One ratio per sequence: its derivative spreads evenly over the sequence's tokens
        mask = batch.mask.float()
        scale = scale.sum(-1, keepdim=True) * mask / mask.sum(-1, keepdim=True).clamp(min=1.0)

    kl_weights = weights * objective.beta if objective.beta != 0.0 else None
    entropy_grads = None
    if objective.entropy_coef != 0.0:
        entropy_grads = batch.mask.float() * (-objective.entropy_coef / batch.entropy_normalizer)
    live = (scale != 0) & (advantages != 0)
    if kl_weights is not None or entropy_grads is not None:
        live = batch.mask.bool()

    # Only proportions matter: put the largest weight near one, so that float16 gradients do not underflow
    unit = 1 / weights.max().clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale * unit
    on_policy_grads = None
    if on_policy:
        phi = vespo_phi(objective, batch).expand_as(weights) if objective.loss_type == "vespo" else None
        on_policy_grads = policy_derivative(objective, advantages, torch.zeros_like(weights), phi) * scale
    return BatchForecast(
        objective=objective,
        live=live,
        scale=scale,
        on_policy=on_policy_grads,
        advantages=advantages,
        old_logps=batch.old_per_token_logps,
        ref_logps=batch.ref_per_token_logps if kl_weights is not None else None,
        kl_weights=None if kl_weights is None else kl_weights * unit,
        entropy_grads=None if entropy_grads is None else entropy_grads * unit,
    )
