"""Bad input is refused before anything is computed, with the tensor and what to change named."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.loss.batch import check_shapes
from trl_fused_grpo.modeling.moe import why_no_aux_loss
from trl_fused_grpo.modeling.output_projection import has_adapter, why_not_sharded

from .eligibility import replaced_objective, why_old_logps_are_needed
from .kl import estimator_in_force
from .loss_request import objective_of, padding_counts


logger = logging.get_logger(__name__)


def check_backward(trainer: GRPOTrainer, backward: str) -> None:
    """
    Raise when a forecast is forced and a batch of the training may have none.

    Raises:
        `ValueError`: naming the options to change.
    """
    reason = why_no_forecast(trainer) if backward == "forecast" else None
    if reason is not None:
        raise ValueError(
            f"fused_backward='forecast' needs an objective whose gradient follows from each token alone, but {reason}; "
            "or set fused_backward='auto', which forecasts where it can."
        )


def why_no_forecast(trainer: GRPOTrainer) -> str | None:
    """
    Why a batch of the training may have no forecast of its gradients, and what to change; `None` where each has one.
    """
    args: Any = trainer.args
    objective = objective_of(trainer)
    found = replaced_objective(trainer)
    if found is not None:
        return f"what {found} does to it is not known: remove it"
    if objective.off_policy_mask_threshold is not None:
        return "the off-policy mask looks at whole sequences: set off_policy_mask_threshold=None"
    if objective.top_entropy_quantile < 1.0:
        return "the entropy quantile looks at the whole batch: set top_entropy_quantile=1.0"
    if padding_counts(trainer):
        return "this TRL's luspo counts padding: use TRL 1.10 or newer, or another loss_type"
    is_sequence_level = objective.importance_sampling_level == "sequence"
    if is_sequence_level and objective.beta != 0.0 and objective.weighs_kl:
        return (
            "the KL term is weighed by the ratio of a whole sequence: set importance_sampling_level='token', beta=0.0, "
            "or use_bias_correction_kl=False and another kl_estimator than 'k4'"
        )
    is_corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    generation = args.steps_per_generation * trainer.num_iterations
    if not objective.is_tokenwise(is_corrected or args.gradient_accumulation_steps % generation != 0):
        what = "importance_sampling_level='sequence'" if is_sequence_level else f"loss_type={objective.loss_type!r}"
        change = (
            "vllm_importance_sampling_correction=False"
            if is_corrected
            else f"gradient_accumulation_steps to a multiple of steps_per_generation * num_iterations, {generation}"
        )
        return f"{what} looks at whole sequences where old log-probs are given: set {change}, or another objective"
    may_skip = (
        FusedOptions.from_args(args).fused_skip_old_logps is not False
        and why_old_logps_are_not_skipped(trainer) is None
    )
    if is_corrected and may_skip and trainer.vllm_importance_sampling_mode.startswith("sequence"):
        return (
            f"the ratio of vllm_importance_sampling_mode={trainer.vllm_importance_sampling_mode!r} is one of a whole "
            "sequence and comes from the training pass: set fused_skip_old_logps=False, or a token mode"
        )
    return None


def why_old_logps_are_not_skipped(trainer: GRPOTrainer) -> str | None:
    """Why `fused_skip_old_logps` cannot act, or `None`."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return "it is about vLLM's importance-sampling correction, which is off"
    return why_old_logps_are_needed(trainer, trainer.args.gradient_accumulation_steps)


def why_zero_grad_sequences_are_not_skipped(trainer: GRPOTrainer, layout: str) -> str | None:
    """Why `fused_skip_zero_grad_sequences` cannot leave a sequence out of the model, or `None`."""
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary loss counts every sequence"
    if trainer.beta != 0.0:
        return f"with beta={trainer.beta} every sequence receives a gradient from the KL term"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "every sequence receives a gradient from the entropy bonus"
    reason = why_no_forecast(trainer)
    if reason is not None:
        return f"it needs to know which sequences receive a gradient, and {reason}"
    if layout != "packed":
        return f"the layout of the rows is {layout!r}, not 'packed': only the head leaves them out"
    return None


def tell_what_has_no_effect(trainer: GRPOTrainer, layout: Callable[[], str]) -> None:
    """
    Log once which options were asked for and cannot act, with the reason.

    Args:
        trainer (`GRPOTrainer`): at the end of its construction.
        layout (`Callable`): gives the layout of its rows.
    """
    reasons, options = {}, FusedOptions.from_args(trainer.args)
    if options.fused_skip_old_logps:
        reasons["fused_skip_old_logps"] = why_old_logps_are_not_skipped(trainer)
    if options.fused_skip_zero_grad_sequences:
        reasons["fused_skip_zero_grad_sequences"] = why_zero_grad_sequences_are_not_skipped(trainer, layout())
    for option, reason in reasons.items():
        if reason is not None:
            logger.warning_once(f"{option}=True has no effect, because {reason}.")


def check_kl_estimator(trainer: Any) -> None:
    """
    Raise when another KL estimator than the host's is asked for and the host's would be trained; tell once when there
    is no KL term, and when the importance ratio makes another estimator of it.

    Raises:
        `ValueError`: naming the options to change.
    """
    name = FusedOptions.from_args(trainer.args).kl_estimator
    if name == "k3":
        return
    if trainer.beta == 0.0:
        logger.warning_once(f"kl_estimator={name!r} has no effect, because beta=0.0 leaves the KL term out.")
    elif not trainer.use_liger_loss:
        raise ValueError(
            f"use_liger_loss=False trains with TRL's own KL term, not with kl_estimator={name!r}: set "
            "use_liger_loss=True, or kl_estimator='k3'."
        )
    elif (found := replaced_objective(trainer)) is not None:
        raise ValueError(
            f"kl_estimator={name!r} does not reach {found}, which computes its KL term itself: set kl_estimator='k3'."
        )
    elif (computed := estimator_in_force(objective_of(trainer))) != name:
        logger.warning_once(
            f"use_bias_correction_kl=True multiplies the KL term by the importance ratio: kl_estimator={name!r} then "
            f"is {computed!r} and is logged as kl/{computed}. For {name!r} itself set use_bias_correction_kl=False."
        )


def check_aux_loss(trainer: Any, causal_lm: PreTrainedModel) -> None:
    """
    Raise when an auxiliary loss is asked of a model that has none.

    Raises:
        `ValueError`: with the reason and the option to change.
    """
    if not getattr(trainer, "aux_loss_enabled", False):
        return
    reason = why_no_aux_loss(causal_lm)
    if reason is not None:
        raise ValueError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} asks for the auxiliary loss of "
            f"{type(causal_lm).__name__}, but {reason}: set router_aux_loss_coef=0.0."
        )


def check_sharding(trainer: GRPOTrainer, causal_lm: PreTrainedModel) -> None:
    """
    Raise when FSDP cannot shard the output projection.

    Raises:
        `ValueError`: with the reason and what to change.
    """
    state = trainer.accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        return
    reason = why_not_sharded(causal_lm, getattr(state.fsdp_plugin, "fsdp_version", 1))
    if reason is not None:
        raise ValueError(f"the adapter on the output projection of {type(causal_lm).__name__} cannot train: {reason}.")


def check_head(trainer: GRPOTrainer, head: nn.Module) -> None:
    """
    Raise when an output projection cannot be run as the options say.

    Raises:
        `ValueError`: naming the options to change.
    """
    args: Any = trainer.args
    if has_adapter(head) and args.cast_lm_head_to_fp32:
        raise ValueError(
            "cast_lm_head_to_fp32=True does not go with a PEFT adapter on lm_head: remove 'lm_head' from "
            "target_modules, or set cast_lm_head_to_fp32=False."
        )


def check_micro_batch(inputs: dict[str, Any]) -> None:
    """
    Raise when a tensor of a micro-batch does not fit its completions.

    Args:
        inputs (`dict`): the micro-batch as TRL's `_compute_loss` gets it.

    Raises:
        `ValueError`: naming the tensor, its shape and the shapes that fit.
    """
    per_token = ("completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
    check_shapes(
        inputs["completion_ids"],
        per_token={name: inputs.get(name) for name in per_token},
        per_sequence={"advantages": inputs.get("advantages")},
        broadcast={"importance_sampling_ratio": inputs.get("importance_sampling_ratio")},
        ids_name="completion_ids",
    )


def check_token_ids(token_ids: Tensor, mask: Tensor, vocab_size: int) -> None:
    """
    Raise when a token that counts lies outside the vocabulary.

    Raises:
        `ValueError`: naming the first such token.
    """
    outside = ((token_ids < 0) | (token_ids >= vocab_size)) & mask.bool()
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"completion_ids[{row}, {column}] is {int(token_ids[row, column])}, outside the model's vocabulary of "
            f"{vocab_size} tokens: use the tokenizer the model was made for, or resize its embeddings."
        )
