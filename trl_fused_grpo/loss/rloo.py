"""
RLOO's loss in the terms of GRPO's objectives, and the forecast of its gradients.

RLOO (https://huggingface.co/papers/2402.14740) has one importance ratio for each sequence, the product of its tokens'
ratios, clipped as GRPO's. Its loss is the mean over sequences. On-policy every token then receives minus the advantage
over the number of sequences, else that times the ratio, or nothing where the clip is in force.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import GRPOBatch, as_columns, put_at
from .forecast import BatchForecast, forecast
from .objective import GRPOObjective, policy_loss


def rloo_objective(epsilon_low: float, epsilon_high: float) -> GRPOObjective:
    """The objective whose clipped term, summed over a sequence's tokens, has RLOO's gradient at ratio one."""
    return GRPOObjective(loss_type="grpo", epsilon_low=epsilon_low, epsilon_high=epsilon_high, reduction="sequence_sum")


@dataclass(frozen=True)
class RLOOForecast(BatchForecast):
    """A [`BatchForecast`] whose `batch.old_per_token_logps` is `[B, 1]`: the sum over each sequence, nats."""

    @property
    def has_equal_grads(self) -> bool:
        return True

    def gradients(self, places: Tensor, logps: Tensor) -> Tensor:
        batch = self.batch
        whole = put_at(places, logps, self.weights.shape)  # [k, T]
        sums = (whole * batch.mask).sum(1, keepdim=True)  # [k, 1], added up as TRL does
        assert batch.old_per_token_logps is not None, "without old log-probs each token has its gradient"
        with torch.enable_grad():
            log_ratio = (sums - batch.old_per_token_logps).requires_grad_()
            loss = policy_loss(self.objective, batch.advantages, log_ratio, log_ratio).sum()
            (grads,) = torch.autograd.grad(loss, log_ratio)  # [k, 1]
        return (grads * self.weights).flatten()[places]


def rloo_forecast(
    objective: GRPOObjective, mask: Tensor, advantages: Tensor, old_logps: Tensor | None
) -> BatchForecast:
    """Forecast the gradient of every position `[B, T]` up to one factor; `old_logps` `[B]` are sums over sequences."""
    batch = GRPOBatch(mask, as_columns(advantages.detach()).float())
    on_policy = forecast(objective, batch)
    assert on_policy is not None, "at ratio one each token has its gradient"
    if old_logps is None:
        return on_policy
    batch = replace(batch, old_per_token_logps=as_columns(old_logps.detach()))
    return RLOOForecast(objective, batch, on_policy.unit, on_policy.weights)
