"""
The GRPO objectives as the derivative of their per-token term: what a forecast of the gradient needs.

The objective itself is computed by TRL. What stands here only predicts the gradient that TRL's loss will send back, so
that it can be built during the forward; a wrong prediction costs time and changes nothing else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
WINDOW_NORMALIZED_LOSSES = ("dapo", "cispo", "vespo")


@dataclass(frozen=True)
class GRPOObjective:
    """
    The options of a GRPO objective, under TRL's names.

    `epsilon_high` is the upper clip range, or the cap itself for CISPO. `delta` is the two-sided bound of the ratio.
    `entropy_coef` is the coefficient in force for this batch, 0.0 where the bonus is off or gated.
    """

    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    entropy_coef: float = 0.0
    max_completion_length: int | None = None
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0

    def is_tokenwise(self, has_old_logps: bool) -> bool:
        """
        Whether a token's gradient follows from its own log-probability alone, so that it can be forecast.

        Anything that looks at the whole sequence or batch first cannot: the off-policy sequence mask, the top-entropy
        quantile, and sequence-level ratios (VESPO's weight too) unless they are one because the policy is the old one.
        """
        if self.off_policy_mask_threshold is not None or self.top_entropy_quantile < 1.0:
            return False
        if self.importance_sampling_level == "sequence":
            return not has_old_logps and not (self.beta != 0.0 and self.use_bias_correction_kl)
        return self.loss_type != "vespo" or not has_old_logps


@dataclass(frozen=True)
class GRPOBatch:
    """
    One micro-batch, under TRL's names.

    Args:
        mask (`Tensor`): loss mask `[B, T]`: the completion mask times the tool mask.
        advantages (`Tensor`): `[B, 1]` or `[B, T]`.
        old_per_token_logps (`Tensor`, *optional*): `[B, T]`; `None` where the policy is the old policy.
        ref_per_token_logps (`Tensor`, *optional*): `[B, T]`.
        importance_sampling_ratio (`Tensor`, *optional*): vLLM's, `[B, T]` or `[B, 1]`.
        normalizer (`Tensor` or `float`): tokens of the accumulation window per process, for DAPO, CISPO and VESPO.
        accumulation (`float`): gradient accumulation steps, 1.0 in evaluation.
        entropy_normalizer (`Tensor` or `float`, *optional*): what the entropy bonus divides the sum of entropies by.
    """

    mask: Tensor
    advantages: Tensor
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    normalizer: Tensor | float = 1.0
    accumulation: float = 1.0
    entropy_normalizer: Tensor | float | None = None


def aggregation_weights(objective: GRPOObjective, batch: GRPOBatch) -> Tensor:
    """Weight of each token's term in the loss `[B, T]`: zero off the mask."""
    mask = batch.mask.float()  # [B, T]
    if objective.loss_type in WINDOW_NORMALIZED_LOSSES:
        return mask / batch.normalizer
    if objective.loss_type in ("grpo", "sapo"):
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask)
    elif objective.loss_type == "bnpo":
        weights = mask / mask.sum().clamp(min=1.0)
    elif objective.loss_type == "dr_grpo":
        weights = mask / (len(mask) * objective.max_completion_length)
    else:
        weights = mask / len(mask)  # luspo: the mean over sequences of the sum over tokens
    return weights / batch.accumulation


def policy_derivative(objective: GRPOObjective, advantages: Tensor, log_ratio: Tensor, phi: Tensor | None) -> Tensor:
    """
    Derivative of the policy term with respect to the log-probability.

    Args:
        advantages (`Tensor`): any shape.
        log_ratio (`Tensor`): log of the importance ratio of policy and old policy, same shape.
        phi (`Tensor`, *optional*): VESPO's sequence weight, same shape.
    """
    if objective.loss_type == "vespo":
        return -phi * advantages
    ratio = log_ratio.exp()
    if objective.loss_type == "cispo":
        return -ratio.clamp(max=objective.epsilon_high) * advantages
    if objective.loss_type == "sapo":
        tau = torch.where(advantages > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
        gate = torch.sigmoid(tau * (ratio - 1))
        return -4 * gate * (1 - gate) * ratio * advantages
    # -min(c1 A, c2 A): at a tie torch.min shares the gradient between its arguments
    low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
    clipped = ratio.clamp(low, high)
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    gap = (clipped - bounded) * advantages
    share = 0.5 * (1 + gap.sign())  # of the unclipped argument
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    passes = 1.0 if objective.delta is None else (ratio <= objective.delta).to(ratio.dtype)
    return -advantages * ratio * (share * passes + (1 - share) * inside)


def kl_derivative(objective: GRPOObjective, ref_log_ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Derivative of the k3 estimate of the KL divergence; `ref_log_ratio` is the reference's log-prob minus ours."""
    slope = 1 - ref_log_ratio.exp()
    if not objective.use_bias_correction_kl:
        return slope
    kl = -slope - ref_log_ratio
    return (kl + slope) * log_ratio.exp()


def vespo_phi(objective: GRPOObjective, batch: GRPOBatch) -> Tensor:
    """VESPO's sequence weight `[B, 1]` while the policy is the old one: only the sampler's ratio moves it from 1."""
    log_w = torch.zeros_like(batch.advantages[:, :1])
    if batch.importance_sampling_ratio is not None:
        log_is = batch.importance_sampling_ratio.log().clamp(-18.420680743952367, 20.0)  # log(1e-8), as TRL has it
        log_w = log_is.sum(-1, keepdim=True).clamp(-18.420680743952367, 20.0)
    positive = batch.advantages[:, :1] >= 0
    k = torch.where(positive, objective.vespo_k_pos, objective.vespo_k_neg)
    lam = torch.where(positive, objective.vespo_lambda_pos, objective.vespo_lambda_neg).clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(0.0, posinf=0.0, neginf=0.0)
