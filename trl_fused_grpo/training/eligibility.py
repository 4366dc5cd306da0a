"""
Which faster paths a trainer may take.

A faster path assumes that TRL's own code runs around it. Each function here looks for something that breaks this, or
that the options forbid. It returns the reason as words that follow "because", or `None` where the path may be taken.
Where there is a reason, that path is left: TRL's slower code trains the same, and the reason is logged once.

| faster path | asks |
| --- | --- |
| log-probs from the fused linear function | [`why_not_fused`] |
| rows without padding | [`why_padding_may_be_read`], `LogpsEngine.why_rows_are_seen`, `modeling/layout_choice.py` |
| micro-batches that share a forward | [`why_forwards_are_not_shared`], [`why_parts_are_in_evaluation`] |
| more of them in the first of a window | `first_forward.why_not_in_memory_of_gradients`, `why_memory_is_taken` |
| old log-probs from the training forward | [`why_old_logps_are_needed`], [`why_generation_is_out_of_turn`] |
| no old log-probs on-policy, left out by TRL | [`why_weights_move`] |
| the reference's log-probs in the policy's groups | [`why_reference_is_not_regrouped`] |
| sequences exchanged between processes | [`why_not_exchanged`] |
| padding that attends to anything, where cuDNN would return NaN | [`why_padding_is_mixed_in`] |
| LoRA's terms within the products | `modeling/adapters.py` |
| gradients forecast in forward | `forecastable.why_no_forecast` |
| zero-grad sequences left out of the model | `forecastable.why_zero_grad_sequences_are_not_skipped` |

Several ask [`why_micro_batches_are_seen`], [`why_generation_is_seen`], [`why_forwards_differ`]. All reasons: `docs/`.
"""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.layout_choice import depends_on_width, traits
from trl_fused_grpo.modeling.output_projection import layer_before_head

from .agreement import elsewhere, on_any_process
from .customisation import MICRO_BATCH_METHODS, micro_batch_reader, replaced_backward, replaced_behind, replaced_method
from .customised_model import changed_head, gradient_hook, unknown_code
from .noise import why_forwards_differ, why_rows_depend_on_others


def replaced_objective(trainer: Any) -> str | None:
    """
    The first method of TRL's objective that the user replaced, as `Class.method`; `None` where all are TRL's. Only
    TRL's own are known to read nothing else of a micro-batch than `GRPOObjective` does.
    """
    return replaced_method(trainer, ("_compute_loss", *trl_compat.OBJECTIVE_METHODS))


def why_micro_batches_are_seen(trainer: Any) -> str | None:
    """Why the user's code may read or change a micro-batch between generation and backward, or `None`."""
    reader = micro_batch_reader(trainer) or elsewhere(trainer, "micro-batches")
    return f"{reader} may read or change micro-batches" if reader else None


def why_parts_are_in_evaluation(trainer: Any) -> str | None:
    """Why the next training step may compute something else than those behind it, or `None`. Asked on all processes."""
    is_left = on_any_process(trainer.accelerator, "mode", trainer._fused.deferral.leaves_evaluation)
    return "a generation has left the model in evaluation, until the training step behind it" if is_left else None


def why_generation_is_seen(trainer: Any) -> str | None:
    """Why the user's code may read or change a generation batch before TRL splits it, or `None`."""
    reader = replaced_method(trainer, ("_generate_and_score_completions",)) or elsewhere(trainer, "generation batches")
    return f"{reader} may read or change generation batches" if reader else None


def why_not_fused(trainer: Any, model: nn.Module, causal_lm: PreTrainedModel) -> str | None:
    """
    Why TRL's own log-prob method must run, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose method was called.
        model (`nn.Module`): the model that the method was given, in its wrappers.
        causal_lm (`PreTrainedModel`): the causal language model inside.
    """
    method = replaced_behind(trainer, "_get_per_token_logps_and_entropies")
    if method is not None:
        return f"{method} was replaced"
    head: Any = causal_lm.get_output_embeddings()
    layer = layer_before_head(causal_lm) if trl_compat.LOGPS_FROM_LOGITS else None
    if layer is not None:
        return f"{layer} stands between the model's hidden states and its output projection"
    reader = changed_head(model, causal_lm, head.modules()) or elsewhere(trainer, "log-probs", model)
    return f"{reader} may read or change what the model returns in TRL's own call" if reader else None


def why_padding_may_be_read(trainer: Any, is_generating: bool) -> str | None:
    """
    Why the user's code may read log-probs at padding positions, or `None`. TRL's own code does not read them, and from
    TRL 1.14 on they are zero.

    Args:
        trainer (`GRPOTrainer`): whose log-prob method was called.
        is_generating (`bool`): whether TRL called it during generation: the result is stored with the micro-batches.
    """
    if not trl_compat.COMPUTES_LOGPS_OF_PADDING:
        return None
    reader = replaced_method(trainer, (*MICRO_BATCH_METHODS, "_generate_and_score_completions"))
    if reader is None and not is_generating:
        reader = "the caller of the log-prob method"
    return f"{reader} may read log-probs of padding" if reader else None


def why_forwards_are_not_shared(trainer: Any, layout: str) -> str | None:
    """
    Why micro-batches may not share a forward of the model, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        layout (`str`): the layout of the policy's rows.
    """
    reason = _why_sequences_stay(trainer)
    if reason is not None:
        return reason
    if layout == "padded":
        return "rows keep TRL's padding"
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss is computed in each micro-batch"
    if trainer.is_deepspeed_enabled and trl_compat.DEEPSPEED_STEPS_WITH_BACKWARD:
        return "this version of Accelerate steps DeepSpeed's engine at every backward"
    return None


def _why_sequences_stay(trainer: Any) -> str | None:
    """Why somebody may see which sequences are in a micro-batch, or what comes of it, or `None`."""
    hook = gradient_hook(trainer.model) or elsewhere(trainer, "gradients")
    backward = replaced_backward(trainer.accelerator)
    if hook is not None:
        return f"{hook} may see the gradient of each micro-batch"
    if backward is not None:
        return f"{backward} may see the loss of each micro-batch"
    return why_micro_batches_are_seen(trainer)


# By model, until the modules are listed anew: a walk over all of them takes as long as a layer
_MIXED_IN: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
_MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def why_padding_is_mixed_in(model: nn.Module) -> str | None:
    """
    Why what attention returns at padding may reach the tokens of a sequence, or `None`. Then it must be what it is in
    stock.

    Args:
        model (`nn.Module`): in its wrappers or bare.
    """
    if model not in _MIXED_IN:
        _MIXED_IN[model] = _why_padding_is_mixed_in(list(model.modules()))
    return _MIXED_IN[model]


def forget_modules() -> None:
    """Look through the modules of all models again."""
    _MIXED_IN.clear()


def _why_padding_is_mixed_in(modules: list[nn.Module]) -> str | None:
    unknown = unknown_code(modules)
    if unknown is not None:
        return f"{unknown}, whose code is not known, may read padding"
    if any(map(torch_compat.is_compiled, modules)):
        return "masks of a compiled model are not seen"
    for module in modules:
        if not isinstance(module, PreTrainedModel):
            continue
        layers = architecture.layer_types(module.config)
        has_state = model_compat.is_stateful(module) or not layers <= _MASKED_LAYERS
        if (
            has_state and not model_compat.masks_state(module)
        ) or module.config.model_type in model_compat.PADDING_MATTERS:
            return "a state may take padding in"
    return None


def why_old_logps_are_needed(trainer: Any) -> str | None:
    """
    Why old log-probs must be computed during generation; `None` where, until the weights move, the training forward
    gives the same numbers, and nobody else reads them.

    Args:
        trainer (`GRPOTrainer`): before it generates.
    """
    if trainers.is_rloo(trainer) and trainer.beta != 0.0:
        return f"with beta={trainer.beta} RLOO's KL penalty in the reward reads them"
    reason = (
        why_generation_is_seen(trainer)
        or why_micro_batches_are_seen(trainer)
        or _why_forwards_differ(trainer)
        or why_rows_depend_on_others(trainer.model)
    )
    if reason is not None:
        return reason
    mover = gradient_reader(trainer) or elsewhere(trainer, "gradients")
    return f"{mover} may move weights" if mover is not None else None


def gradient_reader(trainer: Any) -> str | None:
    """What may read the gradient of each micro-batch, or move weights, or `None`."""
    return gradient_hook(trainer.model) or replaced_backward(trainer.accelerator)


def why_generation_is_out_of_turn(trainer: Any) -> str | None:
    """Why micro-batches of a new generation batch are not trained on from the first one on, or `None`."""
    if trl_compat.step_of(trainer) % trl_compat.steps_per_generation(trainer) != 0:
        return "TRL generates in the middle of a generation batch, whose micro-batches were dropped"
    return None


def why_weights_move(trainer: Any, steps_left: int | None = None) -> str | None:
    """
    Why a generation batch may be trained on with other weights than generated it, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose options say how often and in which steps it is trained on.
        steps_left (`int`, *optional*): micro-batches until the weights move; by default any step counts.
    """
    steps = trainer.args.steps_per_generation * trainer.num_iterations
    moves = trainer.args.gradient_accumulation_steps % steps != 0 if steps_left is None else steps_left < steps
    return "the weights move while a generation batch is in use" if moves else None


def why_reference_is_not_regrouped(trainer: Any, layout: str) -> str | None:
    """
    Why the reference's log-probs are computed during generation, as TRL does; `None` where they are computed
    afterwards, in the same rows and groups of micro-batches as the policy's.

    Args:
        trainer (`GRPOTrainer`): before it generates.
        layout (`str`): the layout of the policy's rows.
    """
    if trainer.beta == 0.0:
        return "there is no reference"
    if trainers.is_rloo(trainer):
        return "RLOO's KL penalty in the reward reads its log-probs"
    if layout == "padded":
        return "rows have TRL's padding, in which all micro-batches have one shape"
    reason = (
        why_generation_is_seen(trainer)
        or why_micro_batches_are_seen(trainer)
        or why_rows_depend_on_others(trainer.model)
    )
    if reason is None and trainer.ref_model is None:
        # TRL shuffles the sequences of a generation batch after the reference's forwards, which draw for each row
        reason = _why_forwards_differ(trainer, with_adapters=False)
    return reason


def why_not_exchanged(
    trainer: Any, causal_lm: PreTrainedModel, layout: str, counts_means: bool = True, has_images: bool = False
) -> str | None:
    """
    Why processes may not exchange sequences of the same micro-batch, or `None` where the loss and every metric over all
    processes stay the same.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        causal_lm (`PreTrainedModel`): its model, without wrappers.
        layout (`str`): the layout of the policy's rows.
        counts_means (`bool`): whether logged means must stay the same too.
        has_images (`bool`): whether a micro-batch of any process has images.
    """
    if trainer.accelerator.num_processes == 1:
        return "there is one process"
    reason, loss_type = _why_sequences_stay(trainer), trainers.loss_type(trainer)
    if reason is not None:
        return reason
    if has_images:
        return "a generation batch has images"
    if layout != "packed":
        return "only packed rows are as long as their sequences"
    if trl_compat.shares_sequences(trainer):
        return "several processes train on the same sequences"
    if traits(causal_lm).needs_last_column or depends_on_width(causal_lm):
        return "what the model computes depends on the padding of each process"
    if loss_type == "bnpo":
        return "bnpo divides by the tokens of each micro-batch"
    if loss_type == "luspo" and trl_compat.LUSPO_COUNTS_PADDING:
        return "this TRL's luspo counts padding"
    has_token_ratios = trainers.corrects_sampling(trainer) and trainer.vllm_importance_sampling_mode.startswith("token")
    if loss_type == "vespo" and has_token_ratios:
        return "vespo counts the importance ratios of padding"
    if trl_compat.has_entropy_bonus(trainer):
        return "the entropy bonus is a mean over each micro-batch"
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss is computed in each micro-batch"
    if counts_means and not trainers.metrics_count_all_processes(trainer):
        return "this version of TRL logs the means of each process"
    return None


def _why_forwards_differ(trainer: Any, with_adapters: bool = True) -> str | None:
    cause = elsewhere(trainer, "rows") or elsewhere(trainer, "code")
    reason = f"{cause} may make two forwards differ" if cause else None
    return why_forwards_differ(trainer.model, with_adapters) or reason
