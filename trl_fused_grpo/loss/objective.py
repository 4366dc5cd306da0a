"""
The GRPO objectives in plain torch.

[`GRPOObjective`] holds the options, under TRL's names. [`token_terms`] computes the loss of each token from its
log-probability: the policy term, masks and ratios on it, and the KL term. Every formula stands here once: the loss
takes its value, the forecast (`forecast.py`) its derivative. `batch.py` holds the tensors of a micro-batch, which are
the other input. `reduction.py` weights the tokens and sums them up; `liger_loss.py` puts everything together.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import GRPOBatch


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
GLOBAL_NORMALIZER_LOSSES = ("dapo", "cispo", "vespo")
LOSS_TYPES = (*CLIPPED_LOSSES, "cispo", "sapo", "vespo")
KL_ESTIMATORS = ("k1", "k2", "k3", "k4")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
REDUCTIONS = ("token_mean", "sequence_mean", "fixed_length", "sequence_sum", "sum")
REDUCTION_ALIASES = {"seq_mean_token_sum_norm": "fixed_length"}  # SkyRL's name

_REDUCTION_OF = {
    **dict.fromkeys(("bnpo", *GLOBAL_NORMALIZER_LOSSES), "token_mean"),
    **dict.fromkeys(("grpo", "sapo"), "sequence_mean"),
    "dr_grpo": "fixed_length",
    "luspo": "sequence_sum",
}

# Bounds of VESPO's log weights, as TRL has them
_LOG_WEIGHT_MIN, _LOG_WEIGHT_MAX = math.log(1e-8), 20.0


@dataclass(frozen=True)
class GRPOObjective:
    """
    The options of a GRPO objective, under TRL's names.

    `epsilon_high` is the upper clip range, or for CISPO the upper bound of the ratio itself. `delta` is the upper bound
    of the ratio in two-sided clipping. `entropy_coef` is the coefficient for this batch: 0.0 without an entropy bonus,
    or while TRL's adaptive control is off. [`kl_loss`] explains `kl_estimator`. [`~reduction.token_weights`] explains
    `reduction`; `None` takes that of the loss type.
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
    kl_estimator: str = "k3"
    reduction: str | None = None

    def check(self) -> None:
        """
        Raise when an option is unknown or options exclude each other.

        Raises:
            `ValueError`: naming the option and what to set instead.
        """
        for name, known in (
            ("loss_type", LOSS_TYPES),
            ("importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS),
            ("kl_estimator", KL_ESTIMATORS),
            ("reduction", (None, *REDUCTIONS, *REDUCTION_ALIASES)),
        ):
            if getattr(self, name) not in known:
                choices = ", ".join(map(repr, filter(None, known)))
                raise ValueError(f"Unknown {name} {getattr(self, name)!r}: expected one of {choices}.")
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={self.loss_type!r}. Use "
                "importance_sampling_level='token' instead."
            )
        if self.effective_reduction == "fixed_length" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length must be provided for loss_type='dr_grpo' and reduction='fixed_length'."
            )

    @property
    def effective_reduction(self) -> str:
        """The reduction option, or where it is `None` that of the loss type; empty for an unknown loss type."""
        reduction = self.reduction or _REDUCTION_OF.get(self.loss_type, "")
        return REDUCTION_ALIASES.get(reduction, reduction)

    @property
    def uses_global_normalizer(self) -> bool:
        """
        Return `True` if the loss is divided by the tokens of the whole optimizer step. BNPO takes those of a
        micro-batch.
        """
        is_global = self.reduction is not None or self.loss_type in GLOBAL_NORMALIZER_LOSSES
        return is_global and self.effective_reduction == "token_mean"

    @property
    def weighs_kl(self) -> bool:
        """Return `True` if the KL term is multiplied by the importance ratio."""
        return self.use_bias_correction_kl or self.kl_estimator == "k4"

    @property
    def is_sequencewise(self) -> bool:
        """
        Return `True` if a token's gradient depends on no other sequence, so that it can be forecast. The top-entropy
        quantile depends on the whole batch.
        """
        return self.top_entropy_quantile >= 1.0 and self.loss_type in LOSS_TYPES

    def is_tokenwise(self, has_old_logps: bool) -> bool:
        """
        Return `True` if a token's gradient depends on no other token's log-probability, so that it can be forecast
        token by token.

        The off-policy sequence mask depends on other tokens. So do sequence-level ratios and VESPO's weight, except
        where the policy is the old policy: the ratio is then one. Even then a sequence-level ratio that multiplies the
        KL term has a gradient of its own.
        """
        if self.off_policy_mask_threshold is not None or not self.is_sequencewise:
            return False
        if self.importance_sampling_level != "token":
            return not has_old_logps and not (self.beta != 0.0 and self.weighs_kl)
        return self.loss_type != "vespo" or not has_old_logps


def rloo_objective(epsilon_low: float, epsilon_high: float) -> GRPOObjective:
    """
    RLOO (https://huggingface.co/papers/2402.14740) in these terms: one importance ratio for each sequence, the product
    of its tokens' ratios, clipped as GRPO's. Old log-probabilities are sums over sequences, `[B, 1]`. Its loss is the
    mean over sequences.
    """
    return GRPOObjective(
        loss_type="grpo",
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        importance_sampling_level="product",
        reduction="sequence_sum",
    )


class TokenTerms(NamedTuple):
    """The terms of each token `[B, T]`, or of each sequence `[B, 1]`."""

    loss: Tensor
    ratio: Tensor  # importance ratio, before any clipping
    kl: Tensor | None
    phi: Tensor | None  # VESPO's sequence weight


def kl_reference(objective: GRPOObjective, batch: GRPOBatch) -> Tensor | None:
    """The reference's log-probs that the loss of a micro-batch has a KL term against, or `None` where it has none."""
    return batch.ref_per_token_logps if objective.beta != 0.0 else None


def token_terms(
    objective: GRPOObjective,
    batch: GRPOBatch,
    logps: Tensor,  # [B, T], nats, of the policy
    entropies: Tensor | None = None,  # [B, T], nats; needed for the top-entropy quantile only
) -> TokenTerms:
    """Compute the loss of each token, before the reduction. Loss and KL term are differentiable, the rest is not."""
    mask = batch.mask
    old_logps = logps.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
    log_ratio = logps - old_logps  # [B, T]
    phi = gamma_weights(objective, batch, log_ratio.detach()) if objective.loss_type == "vespo" else None
    if objective.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)  # [B, 1]
    elif objective.importance_sampling_level == "product":
        sums = (logps * mask).sum(-1, keepdim=True)  # [B, 1], added up as TRL does
        log_ratio = sums - (sums.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps)

    loss = policy_loss(objective, batch.advantages, logps, log_ratio, phi)
    if objective.importance_sampling_level == "product":
        loss = loss / mask.sum(-1, keepdim=True).clamp(min=1.0)  # each token has a part of it
    if objective.off_policy_mask_threshold is not None:
        sampling_logps = old_logps if batch.sampling_per_token_logps is None else batch.sampling_per_token_logps
        loss = loss * off_policy_mask(objective, batch, sampling_logps - logps.detach())
    if objective.top_entropy_quantile < 1.0:
        assert entropies is not None, "top_entropy_quantile needs entropies"
        loss = loss * high_entropy_mask(entropies, mask, objective.top_entropy_quantile)
    if batch.importance_sampling_ratio is not None and phi is None:
        loss = loss * batch.importance_sampling_ratio
    kl = None
    ref_logps = kl_reference(objective, batch)
    if ref_logps is not None:
        kl = kl_loss(objective, ref_logps, logps, log_ratio)
        loss = loss + objective.beta * kl
    return TokenTerms(loss, log_ratio.detach().exp(), kl, phi)


def policy_loss(
    objective: GRPOObjective,
    advantages: Tensor,  # of any shape that broadcasts
    logps: Tensor,  # the same
    log_ratio: Tensor,  # log of the importance ratio of policy and old policy, per token or sequence
    phi: Tensor | None = None,  # VESPO's sequence weight
) -> Tensor:
    """The policy term of each token, before the importance ratio of policy and sampler multiplies it."""
    if phi is not None:
        return -phi * advantages * logps
    ratio = log_ratio.exp()
    if objective.loss_type == "cispo":
        return -ratio.clamp(max=objective.epsilon_high).detach() * advantages * logps
    if objective.loss_type == "sapo":
        tau = torch.where(advantages > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    clipped = ratio.clamp(1 - objective.epsilon_low, 1 + objective.epsilon_high)
    if objective.delta is not None:
        ratio = ratio.clamp(max=objective.delta)
    return -torch.min(ratio * advantages, clipped * advantages)


def kl_loss(objective: GRPOObjective, ref_logps: Tensor, logps: Tensor, log_ratio: Tensor) -> Tensor:
    """
    An estimate of `KL[policy, reference]` from each sampled token.

    `k1`, `k2` and `k3` are those of John Schulman's note "Approximating KL Divergence"
    (http://joschu.net/blog/kl-approx.html), with `log r = ref_logps - logps`: `-log r`, `(log r)^2 / 2` and
    `r - 1 - log r`. `k4` is `k1` times the importance ratio, whose gradient is that of the divergence itself
    (open-instruct's name). `use_bias_correction_kl` multiplies any of them by that ratio.
    """
    if objective.kl_estimator == "k3":
        # The difference twice, as in TRL: the gradient is then equal to the bit, however close the two policies are
        kl = (ref_logps - logps).exp() - (ref_logps - logps) - 1
    elif objective.kl_estimator == "k2":
        kl = (ref_logps - logps).square() / 2
    else:
        kl = logps - ref_logps
    return kl * log_ratio.exp() if objective.weighs_kl else kl


def gamma_weights(objective: GRPOObjective, batch: GRPOBatch, log_ratio: Tensor) -> Tensor:
    """
    VESPO's weight of each sequence `[B, 1]`, or `[B, T]` for advantages by token.

    `phi(w) = exp(lambda + k log w - lambda w)`, where `log w` sums `log_ratio` `[B, T]` (policy and old policy) and the
    log of the sampler's ratio over the sequence. `k` and `lambda` depend on the sign of the advantage.
    """
    log_w = (log_ratio.clamp(-20.0, 20.0) * batch.mask).sum(-1, keepdim=True)  # [B, 1]
    if batch.importance_sampling_ratio is not None:
        log_is = batch.importance_sampling_ratio.log().clamp(_LOG_WEIGHT_MIN, _LOG_WEIGHT_MAX)
        log_w = log_w + log_is.sum(-1, keepdim=True)
    log_w = log_w.clamp(_LOG_WEIGHT_MIN, _LOG_WEIGHT_MAX)
    positive = batch.advantages >= 0
    k = torch.where(positive, objective.vespo_k_pos, objective.vespo_k_neg)
    lam = torch.where(positive, objective.vespo_lambda_pos, objective.vespo_lambda_neg).clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(0.0, posinf=0.0, neginf=0.0)


def off_policy_mask(objective: GRPOObjective, batch: GRPOBatch, sampling_log_ratio: Tensor) -> Tensor:
    """
    DeepSeek-V3.2's off-policy sequence mask, bool, `[B, 1]` or for advantages by token `[B, T]`: true where the policy
    term counts.

    It is false where the advantage is negative and `sampling_log_ratio` `[B, T]`, the sampler's log-probabilities minus
    the policy's, exceeds the threshold in the mean over the sequence.
    """
    count = batch.mask.sum(-1, keepdim=True).clamp(min=1.0)
    mean = (sampling_log_ratio.nan_to_num(nan=0.0) * batch.mask).sum(-1, keepdim=True) / count  # [B, 1]
    threshold = objective.off_policy_mask_threshold
    assert threshold is not None
    return (batch.advantages >= 0) | (mean <= threshold)


def high_entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Mark the tokens among the fraction `quantile` of highest entropy in this batch, bool `[B, T]`."""
    unmasked = entropies.detach()[mask.bool()].float()
    if not len(unmasked):
        return torch.zeros_like(mask, dtype=torch.bool)
    return (entropies * mask >= torch.quantile(unmasked, 1 - quantile)) & mask.bool()
