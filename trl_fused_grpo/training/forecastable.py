"""
Whether every batch of a training can have a forecast of its gradients, and what follows from one.

A forecast exists where the gradient of a token follows from that token's log-prob alone. Each function returns the
reason why not, as in `eligibility.py`, and after a colon what to change.
"""

from typing import Any

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.loss.objective import GRPOObjective

from .eligibility import corrects_sampling, replaced_objective, why_old_logps_are_not_skipped
from .loss_request import objective_of, padding_counts


def why_no_forecast(trainer: Any) -> str | None:
    """
    Why a batch of the training may have no forecast of its gradients, and what to change; `None` where each has one.
    """
    method = replaced_objective(trainer)
    if method is not None:
        return f"what {method} does to the gradient is not known: remove it"
    objective = objective_of(trainer)
    return (
        _why_objective_is_not_tokenwise(trainer, objective)
        or _why_old_logps_couple_tokens(trainer, objective)
        or _why_ratio_couples_tokens(trainer)
    )


def _why_objective_is_not_tokenwise(trainer: Any, objective: GRPOObjective) -> str | None:
    """Why a token's gradient never follows from its own log-prob alone under these options, or `None`."""
    if objective.off_policy_mask_threshold is not None:
        return "the off-policy mask looks at whole sequences: set off_policy_mask_threshold=None"
    if objective.top_entropy_quantile < 1.0:
        return "the entropy quantile looks at the whole batch: set top_entropy_quantile=1.0"
    if padding_counts(trainer):
        return "this TRL's luspo counts padding: use TRL 1.10 or newer, or another loss_type"
    if objective.importance_sampling_level == "sequence" and objective.beta != 0.0 and objective.weighs_kl:
        return (
            "the KL term is weighted by the ratio of a whole sequence: set importance_sampling_level='token', or "
            "beta=0.0, or use_bias_correction_kl=False and another kl_estimator than 'k4'"
        )
    return None


def _why_old_logps_couple_tokens(trainer: Any, objective: GRPOObjective) -> str | None:
    """Why the ratio to old log-probs, where a batch has them, couples the tokens of a sequence; or `None`."""
    is_corrected = corrects_sampling(trainer)
    steps = trainer.args.steps_per_generation * trainer.num_iterations
    has_old_logps = is_corrected or trainer.args.gradient_accumulation_steps % steps != 0
    if objective.is_tokenwise(has_old_logps):
        return None
    is_sequence_level = objective.importance_sampling_level == "sequence"
    option = "importance_sampling_level='sequence'" if is_sequence_level else f"loss_type={objective.loss_type!r}"
    change = f"gradient_accumulation_steps to a multiple of steps_per_generation * num_iterations, {steps}"
    if is_corrected:
        change = "vllm_importance_sampling_correction=False"
    return f"{option} looks at whole sequences where old log-probs are given: set {change}, or another objective"


def _why_ratio_couples_tokens(trainer: Any) -> str | None:
    """Why vLLM's importance ratio, where the training forward computes it, couples the tokens; or `None`."""
    if not corrects_sampling(trainer) or not trainer.vllm_importance_sampling_mode.startswith("sequence"):
        return None
    may_skip = FusedOptions.from_args(trainer.args).fused_skip_old_logps is not False
    if not may_skip or why_old_logps_are_not_skipped(trainer) is not None:
        return None
    return (
        f"the ratio of vllm_importance_sampling_mode={trainer.vllm_importance_sampling_mode!r} belongs to a whole "
        "sequence and comes from the training forward: set fused_skip_old_logps=False, or a token mode"
    )


def why_zero_grad_sequences_are_not_skipped(trainer: Any, layout: str) -> str | None:
    """Why `fused_skip_zero_grad_sequences` cannot leave a sequence out of the model, or `None`."""
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss counts every sequence"
    if trainer.beta != 0.0:
        return f"with beta={trainer.beta} every sequence receives a gradient from the KL term"
    if trl_compat.has_entropy_bonus(trainer):
        return "every sequence receives a gradient from the entropy bonus"
    reason = why_no_forecast(trainer)
    if reason is not None:
        return f"it needs to know which sequences receive a gradient, and {reason}"
    if layout != "packed":
        return f"the layout of the rows is {layout!r}, not 'packed': only the head leaves them out"
    return None
