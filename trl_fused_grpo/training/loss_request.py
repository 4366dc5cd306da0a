"""Which positions a loss projects, and the gradients that it expects back."""

from typing import Any

import torch
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.config import kl_estimator_of
from trl_fused_grpo.loss.batch import as_columns
from trl_fused_grpo.loss.deferred_forecast import DeferredForecast
from trl_fused_grpo.loss.forecast import BatchForecast
from trl_fused_grpo.loss.liger_loss import FusedLinearGRPOLoss
from trl_fused_grpo.loss.objective import GRPOObjective
from trl_fused_grpo.loss.reduction import luspo_counts_padding
from trl_fused_grpo.loss.rloo import rloo_objective

from .deferred_ratio import DEFERRED
from .logps_request import LogpsArgs, LogpsRequest
from .overrides import loss_type_of
from .rloo import build_rloo_request


# Options of the objective that stand in the arguments. Older TRL has fewer
_OPTIONS_IN_ARGS = (
    "delta",
    "use_bias_correction_kl",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def padding_counts(trainer: GRPOTrainer, beta: float | None = None) -> bool:
    """
    Return `True` if TRL's objective reads padding positions too, see [`luspo_counts_padding`].

    Args:
        trainer (`GRPOTrainer`): whose objective it is.
        beta (`float`, *optional*): coefficient of the KL term. Defaults to the trainer's.
    """
    if not trl_compat.LUSPO_COUNTS_PADDING:
        return False
    objective = objective_of(trainer, beta=beta)
    has_token_factors = trainer.use_vllm or objective.top_entropy_quantile < 1.0
    return luspo_counts_padding(objective, objective.beta != 0.0, has_token_factors)


def objective_of(trainer: GRPOTrainer, entropy_coef: float = 0.0, beta: float | None = None) -> GRPOObjective:
    """
    The trainer's objective as plain options.

    Args:
        trainer (`GRPOTrainer`): whose objective it is.
        entropy_coef (`float`): coefficient of the entropy bonus.
        beta (`float`, *optional*): coefficient of the KL term. Defaults to the trainer's.
    """
    loss_type = loss_type_of(trainer)
    if loss_type == "rloo":
        return rloo_objective(trainer.epsilon_low, trainer.epsilon_high)
    options: dict[str, Any] = {
        "loss_type": loss_type,
        "epsilon_low": trainer.epsilon_low,
        "epsilon_high": trainer.epsilon_high,
        "beta": trainer.beta if beta is None else beta,
        "top_entropy_quantile": trainer.top_entropy_quantile,
        "kl_estimator": kl_estimator_of(trainer.args),
    }
    if loss_type == "gmpo":  # GMPOTrainer leaves the other options of a GRPOConfig out
        return GRPOObjective(**options)
    return GRPOObjective(
        **options,
        importance_sampling_level=trainer.importance_sampling_level,
        entropy_coef=entropy_coef,
        max_completion_length=trainer.max_completion_length,
        off_policy_mask_threshold=trainer.off_policy_mask_threshold,
        **{name: getattr(trainer.args, name) for name in _OPTIONS_IN_ARGS if hasattr(trainer.args, name)},
    )


def build_call_request(
    trainer: GRPOTrainer, call: LogpsArgs, every_position: bool, beta: float | None = None
) -> LogpsRequest:
    """
    Decide which positions to project for a call that may not come from TRL's own loss: those of its attention mask.

    Args:
        trainer (`GRPOTrainer`): whose log-prob method was called.
        call ([`LogpsArgs`]): the call.
        every_position (`bool`): whether log-probs of padding may be read.
        beta (`float`, *optional*): coefficient of the KL term. Defaults to the trainer's.
    """
    mask = call.attention_mask[:, -call.logits_to_keep :]  # [B, T]
    reads_padding = padding_counts(trainer, beta)
    every_position = every_position or reads_padding
    return LogpsRequest(torch.ones_like(mask) if every_position else mask, reads_padding=reads_padding)


def build_loss_request(
    trainer: Any, inputs: dict[str, Any], skip_zero_grad: bool, beta: float | None = None
) -> LogpsRequest:
    """
    Decide which positions of a micro-batch to project for the loss, and forecast their gradients.

    Args:
        trainer (`GRPOTrainer`): whose objective it is.
        inputs (`dict`): the micro-batch as TRL's `_compute_loss` gets it.
        skip_zero_grad (`bool`): whether sequences that can receive no gradient may be left out.
        beta (`float`, *optional*): coefficient of the KL term. Defaults to the trainer's.
    """
    if trainers.is_rloo(trainer):
        return build_rloo_request(trainer, inputs, skip_zero_grad)
    mask = trl_compat.loss_mask(trainer, inputs)  # [B, T]
    old_logps = inputs.get("old_per_token_logps")
    entropy_coef = _entropy_coef_in_force(trainer)
    if padding_counts(trainer, beta):
        return LogpsRequest(torch.ones_like(mask), entropy_grad=entropy_coef != 0.0, reads_padding=True)
    if not torch.is_grad_enabled():
        return LogpsRequest(mask, fill=old_logps)

    objective = objective_of(trainer, entropy_coef, beta)
    has_ratio, takes_ratio = trainers.corrects_sampling(trainer), objective.loss_type != "gmpo"
    deferred = DEFERRED in inputs and has_ratio
    corrected = has_ratio and not deferred and takes_ratio
    normalizer = trl_compat.global_normalizer(trainer, inputs) if objective.uses_global_normalizer else None
    correction = trainer._fused.ratio.correction if deferred and takes_ratio else None
    # A ratio that multiplies each token's own term keeps the tokens apart
    is_tokenwise = correction is None or (not correction.is_per_sequence and objective.is_tokenwise(has_old_logps=True))
    forecast = FusedLinearGRPOLoss.from_objective(objective).forecast(
        mask,
        inputs["advantages"],
        old_per_token_logps=old_logps,
        ref_per_token_logps=inputs.get("ref_per_token_logps"),
        vllm_is_ratio=inputs["importance_sampling_ratio"] if corrected else None,
        normalizer=1.0 if normalizer is None else normalizer,
        accumulation=trainer.current_gradient_accumulation_steps,
        entropy_normalizer=trl_compat.entropy_normalizer(trainer, mask, normalizer) if entropy_coef else None,
        sampling_per_token_logps=inputs.get("sampling_per_token_logps"),
        correction=None if is_tokenwise else correction,
    )
    if correction is not None and isinstance(forecast, BatchForecast):
        forecast = DeferredForecast(forecast, correction, inputs["sampling_per_token_logps"])
    skippable = _skippable(inputs, objective) if skip_zero_grad else None
    # Sequences that are left out have the sampler's log-probs then, and so a ratio of one
    is_filled = deferred and skippable is not None
    fill = inputs["sampling_per_token_logps"].nan_to_num() if is_filled else old_logps
    return LogpsRequest(mask, fill, forecast, entropy_grad=entropy_coef != 0.0, skippable=skippable)


def _skippable(inputs: dict[str, Any], objective: GRPOObjective) -> torch.Tensor | None:
    """The sequences `[B]` of a micro-batch that may be left out of the model, as far as TRL's metrics are concerned."""
    is_zero = as_columns(inputs["advantages"] == 0).all(1)  # [B]
    if inputs.get("old_per_token_logps") is None and DEFERRED not in inputs:
        return torch.ones_like(is_zero)  # on-policy nothing is clipped, and every weight is known
    # Of ratios to the old policy vespo logs a weight of every sequence, the others what is clipped: of advantages that
    # are not zero, also where vLLM's ratio leaves them no gradient
    return None if objective.loss_type == "vespo" else is_zero


def _entropy_coef_in_force(trainer: GRPOTrainer) -> float:
    """Coefficient of the entropy bonus in this step. TRL's adaptive bonus is off above its target."""
    if not trl_compat.has_entropy_bonus(trainer) or loss_type_of(trainer) == "gmpo":
        return 0.0
    args: Any = trainer.args
    is_off = trainer.use_adaptive_entropy and trl_compat.last_entropy(trainer) > args.entropy_target
    return 0.0 if is_off else trainer.entropy_coef
