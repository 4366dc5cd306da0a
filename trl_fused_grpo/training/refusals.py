"""
Refuses what cannot be trained before anything is computed: options and models in the trainer's constructor, tensors at
each micro-batch. The message names the option or tensor and says what to change.
"""

from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.models import is_peft_model, is_prompt_learning
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.loss.batch import check_shapes
from trl_fused_grpo.modeling.head.moe import why_no_aux_loss
from trl_fused_grpo.modeling.head.output_projection import has_adapter, why_not_sharded

from .findings import Findings, replaced_behind, replaced_method, replaced_objective
from .kl import estimator_in_force
from .memory import why_no_memory_budget
from .plan import (
    has_old_logps,
    why_no_forecast,
    why_old_logps_are_needed,
    why_zero_grad_sequences_are_not_skipped,
)
from .requests import objective_of


logger = logging.get_logger(__name__)


def check_backward(trainer: GRPOTrainer, backward: str | None) -> None:
    """Raise when `fused_backward="forecast"` is asked for and a batch of the training may have no forecast."""
    reason = why_no_forecast(trainer) if backward == "forecast" else None
    if reason is not None:
        raise ValueError(
            f"fused_backward='forecast' needs a gradient that follows from each token's own log-prob, but {reason}; "
            "or leave fused_backward out, which forecasts where it can."
        )


def log_what_has_no_effect(trainer: Any, options: FusedOptions, findings: Findings, packed: bool) -> None:
    """Log once which options were asked for and have no effect, with the reason, at the end of construction."""
    reasons: dict[str, str | None] = {}
    if options.fused_skip_old_logps:
        none = "TRL computes none where no weight moves while a generation batch is in use"
        reasons["fused_skip_old_logps"] = (
            why_old_logps_are_needed(trainer, findings) if has_old_logps(trainer) else none
        )
    if options.fused_skip_zero_grad_sequences:
        reasons["fused_skip_zero_grad_sequences"] = why_zero_grad_sequences_are_not_skipped(trainer, packed)
    if options.fused_memory is not None:
        reasons["fused_memory"] = why_no_memory_budget(trainer)
    if options.fused_keep_base_weights:
        reasons["fused_keep_base_weights"] = why_base_weights_stay(trainer)
    for option, reason in reasons.items():
        log_no_effect(f"{option}={getattr(options, option)}", reason)


def log_no_effect(asked_for: str | None, reason: str | None) -> None:
    """Log once why something has no effect, where there is a reason and it was asked for."""
    if reason is not None and asked_for is not None:
        logger.warning_once(f"{asked_for} has no effect, because {reason}.")


def why_base_weights_stay(trainer: Any) -> str | None:
    """Why no adapter is merged into weights and taken out again in a training, or `None`."""
    if not is_peft_model(trainer.model) or is_prompt_learning(trainer.model):
        return "the model has no adapters"
    return None if trainer.use_vllm else "adapters are merged for vLLM alone"


def check_kl_estimator(trainer: Any, name: str) -> None:
    """
    Raise when another `kl_estimator` than TRL's `"k3"` is asked for and would not be trained. Log once when there is no
    KL term, and when `use_bias_correction_kl` turns the estimator into another.
    """
    if name == "k3":
        return
    if trainers.beta_of_loss(trainer) == 0.0:
        reason = (
            "RLOO has its KL term in the reward" if trainers.is_rloo(trainer) else "beta=0.0 leaves the KL term out"
        )
        logger.warning_once(f"kl_estimator={name!r} has no effect, because {reason}.")
    elif not trainer.use_liger_loss:
        raise ValueError(
            f"use_liger_loss=False trains with TRL's own KL term, not with kl_estimator={name!r}: set "
            "use_liger_loss=True, or kl_estimator='k3'."
        )
    elif (method := replaced_objective(trainer)) is not None:
        raise ValueError(
            f"kl_estimator={name!r} does not reach {method}, which computes its KL term itself: set kl_estimator='k3'."
        )
    elif not (objective := objective_of(trainer, kl_estimator=name)).effective_reduction:
        raise ValueError(
            f"kl_estimator={name!r} does not know how loss_type={trainer.loss_type!r} is averaged: set "
            "kl_estimator='k3'."
        )
    elif (computed := estimator_in_force(objective)) != name:
        logger.warning_once(
            f"use_bias_correction_kl=True multiplies the KL term by the importance ratio: kl_estimator={name!r} then "
            f"is {computed!r} and is logged as kl/{computed}. For {name!r} itself set use_bias_correction_kl=False."
        )


def check_aux_loss(trainer: Any, causal_lm: PreTrainedModel) -> None:
    """Raise when an auxiliary loss is asked for and the model has none."""
    if not trl_compat.has_aux_loss(trainer):
        return
    reason = why_no_aux_loss(causal_lm)
    if reason is not None:
        raise ValueError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} asks for the auxiliary loss of "
            f"{type(causal_lm).__name__}, but {reason}: set router_aux_loss_coef=0.0."
        )


def check_sharding(trainer: GRPOTrainer, causal_lm: PreTrainedModel) -> None:
    """Raise when FSDP cannot shard the output projection with its adapter."""
    state = trainer.accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        return
    reason = why_not_sharded(causal_lm, getattr(state.fsdp_plugin, "fsdp_version", 1))
    if reason is not None:
        raise ValueError(f"the adapter on the output projection of {type(causal_lm).__name__} cannot train: {reason}.")


def log_that_nothing_is_fused(trainer: Any) -> None:
    """Log once that a training step ended without a call of TRL's log-prob method, which is what is fused."""
    method = replaced_method(trainer, ("_get_per_token_logps_and_entropies", *trainers.STEP_METHODS))
    reason = "the loss does not ask for them" if method is None else f"{method} does not ask for them with super()"
    logger.warning_once(f"No log-probs come from the fused linear function, because {reason}.")


def check_trl_logps(trainer: Any, causal_lm: PreTrainedModel, reason: str | None) -> None:
    """Raise where TRL's own log-prob method is called and would leave something out."""
    if reason is None:
        return
    leaves_out = trl_compat.REFUSES_ADAPTER_ON_HEAD and has_adapter(causal_lm.get_output_embeddings())
    if leaves_out and replaced_behind(trainer, "_get_per_token_logps_and_entropies") is None:
        raise ValueError(
            f"TRL's own log-prob method must be called, because {reason}, but it leaves out the adapter on the output "
            "projection: remove the one or the other."
        )


def check_head(trainer: GRPOTrainer, head: nn.Module) -> None:
    """Raise when an output projection and the options exclude each other."""
    if has_adapter(head) and trainers.casts_head(trainer):
        raise ValueError(
            "cast_lm_head_to_fp32=True does not go with a PEFT adapter on lm_head: remove 'lm_head' from "
            "target_modules, or set cast_lm_head_to_fp32=False."
        )


def check_micro_batch(inputs: dict[str, Any]) -> None:
    """Raise when a tensor of a micro-batch does not fit its completions."""
    per_token = ("completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
    check_shapes(
        inputs["completion_ids"],
        per_token={name: inputs.get(name) for name in per_token},
        per_sequence={name: inputs.get(name) for name in ("advantages", "old_logps")},
        broadcast={"importance_sampling_ratio": inputs.get("importance_sampling_ratio")},
        ids_name="completion_ids",
    )
