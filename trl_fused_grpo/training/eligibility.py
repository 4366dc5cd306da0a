"""
Which faster paths a trainer may take. Each function names why one may not be taken, or returns `None`: the path assumes
that nothing was replaced which could tell it from TRL's own, and is left where something was.
"""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.output_projection import has_adapter

from .customisation import (
    MICRO_BATCH_METHODS,
    changed_head,
    changed_module,
    gradient_hook,
    own_class,
    replaced_backward,
    replaced_behind,
    replaced_method,
    watching_callback,
)


def replaced_objective(trainer: Any) -> str | None:
    """The method by which somebody replaced TRL's objective, or `None`: then anything may be read of what it reads."""
    return replaced_method(trainer, ("_compute_loss", *trl_compat.OBJECTIVE_METHODS))


def why_micro_batches_are_seen(trainer: Any) -> str | None:
    """Why a micro-batch may be read, or changed, by other code than TRL's between generation and loss, or `None`."""
    found = replaced_method(trainer, MICRO_BATCH_METHODS) or watching_callback(trainer)
    return f"{found} may read or change micro-batches" if found else None


def why_generation_is_seen(trainer: Any) -> str | None:
    """Why a generation batch may be read, or changed, by other code than TRL's before it is cut, or `None`."""
    found = replaced_method(trainer, ("_generate_and_score_completions",))
    return f"{found} may read or change generation batches" if found else None


def why_not_fused(trainer: Any, model: nn.Module, causal_lm: PreTrainedModel) -> str | None:
    """
    Why TRL's own log-prob method must run, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose method was called.
        model (`nn.Module`): the model that was given, in its wrappers.
        causal_lm (`PreTrainedModel`): the causal language model inside.
    """
    found = replaced_behind(trainer, "_get_per_token_logps_and_entropies")
    if found is not None:
        return f"{found} was replaced"
    head: Any = causal_lm.get_output_embeddings()
    if has_adapter(head) and trl_compat.REFUSES_ADAPTER_ON_HEAD:
        return None  # there is nothing of TRL's to run: its own method leaves such an adapter out
    found = changed_head(model, causal_lm, head.modules())
    return f"{found} may read or change what TRL's own call returns" if found else None


def why_padding_may_be_read(trainer: Any, is_generating: bool) -> str | None:
    """
    Why log-probs of padding may be read, or `None`: TRL's own code does not, and newer TRL has zeros there.

    Args:
        trainer (`GRPOTrainer`): whose log-prob method was called.
        is_generating (`bool`): whether TRL called it while it generates: the result is kept with the micro-batches.
    """
    if not trl_compat.SCORES_PADDING:
        return None
    found = replaced_method(trainer, (*MICRO_BATCH_METHODS, "_generate_and_score_completions"))
    if found is None and not is_generating:
        found = "the caller of the log-prob method"
    return f"{found} may read log-probs of padding" if found else None


def why_reference_is_not_regrouped(trainer: Any, layout: str) -> str | None:
    """
    Why the reference's log-probs are computed where TRL does; `None` where they may be computed in the forwards that
    the policy will have.
    """
    if trainer.beta == 0.0:
        return "there is no reference"
    if layout == "padded":
        return "rows have TRL's padding, in which every micro-batch has one shape"
    return why_generation_is_seen(trainer) or why_micro_batches_are_seen(trainer)


def why_forwards_differ(model: nn.Module) -> str | None:
    """Why two forwards of a model in training give different numbers, or `None`."""
    changed = changed_module(model.modules())
    if changed is not None:
        return f"{changed} may make each forward another"
    unknown = own_class(model.modules())
    if unknown is not None:
        return f"{unknown}, whose code is not known, may make each forward another"
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            return f"dropout ({name}) makes each forward another"
        if getattr(module, "neftune_noise_alpha", None):
            return "NEFTune's noise makes each forward another"
    options = getattr(model, "config", None)
    noise = _noise_option(options.to_dict()) if model.training and hasattr(options, "to_dict") else None
    return f"dropout ({noise}) makes each forward another" if noise else None


def _noise_option(options: dict[str, Any]) -> str | None:
    """
    A probability of dropout, or a strength of router jitter, in a model's configuration or in one within it: attention
    drops out in a call, not in a module, and families name it in several ways.
    """
    for key, value in options.items():
        name = str(key)
        found = _noise_option(value) if isinstance(value, dict) else None
        if found is not None:
            return found
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0:
            return name
    return None


def why_old_logps_are_needed(trainer: Any, steps_left: int) -> str | None:
    """
    Why old log-probs must be computed before training, or `None` where the training forward computes the same numbers:
    the weights do not move between generation and loss, and nobody else reads them.

    Args:
        trainer (`GRPOTrainer`): before it generates.
        steps_left (`int`): micro-batches until the weights move.
    """
    args: Any = trainer.args
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return "TRL decides without vLLM's correction"
    reason = why_generation_is_seen(trainer) or why_micro_batches_are_seen(trainer)
    if reason is not None:
        return reason
    noise = why_forwards_differ(trainer.model)
    if noise is not None:
        return noise
    found = gradient_hook(trainer.model)
    if found is not None or replaced_backward(trainer.accelerator):
        return f"{found or 'the backward, which was replaced,'} may move weights"
    if steps_left < args.steps_per_generation * trainer.num_iterations:
        return "the weights move while a generation batch is in use"
    return None


def why_not_balanced(trainer: Any) -> str | None:
    """Why sequences may not be dealt into micro-batches anew; `None` where the cut does not matter."""
    args: Any = trainer.args
    reason = why_micro_batches_are_seen(trainer)
    if reason is not None:
        return reason
    if args.gradient_accumulation_steps % args.steps_per_generation != 0:
        return "an accumulation window covers part of a generation batch"
    if trainer.loss_type == "bnpo":
        return "bnpo divides by the tokens of each micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "the entropy quantile is taken in each micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over each micro-batch"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary loss is computed in each micro-batch"
    return None


def why_forwards_are_not_shared(trainer: Any, layout: str) -> str | None:
    """Why micro-batches may not share a forward of the model; `None` where they may."""
    reason = why_micro_batches_are_seen(trainer)
    if reason is not None:
        return reason
    found = gradient_hook(trainer.model)
    if found is not None:
        return f"{found} sees each micro-batch's"
    if replaced_backward(trainer.accelerator):
        return "the accelerator's backward was replaced and may see each micro-batch's loss"
    if layout != "packed":
        return f"the layout of the rows is {layout!r}, not 'packed'"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary loss is computed in each micro-batch"
    if trainer.is_deepspeed_enabled and trl_compat.DEEPSPEED_STEPS_WITH_BACKWARD:
        return "DeepSpeed counts backwards under this version of Accelerate"
    return None
