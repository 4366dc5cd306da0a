"""
What a generation batch and its micro-batches get at the level `window`: facts of the options and of library code, which
are no levels. Each function returns the reason why not as words that follow "because", or `None`.
"""

from typing import Any

from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.layers.memo import LayerMemo

from .findings import Level
from .loss_request import objective_of, padding_counts
from .overrides import replaced_objective
from .randomness import why_forwards_differ, why_rows_depend_on_others


def why_forwards_are_not_shared(trainer: Any, packed: bool) -> str | None:
    """Why micro-batches whose rows are `packed`, or not, may not share a forward of the model, or `None`."""
    if (reason := trainer._fused.ladder.findings.why_below(Level.WINDOW)) is not None:
        return reason
    if not packed:
        return "rows keep TRL's padding"
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss is computed in each micro-batch"
    if trainer.is_deepspeed_enabled and trl_compat.DEEPSPEED_STEPS_WITH_BACKWARD:
        return "this version of Accelerate steps DeepSpeed's engine at every backward"
    return None


_MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@LayerMemo
def why_padding_is_mixed_in(causal_lm: PreTrainedModel) -> str | None:
    """
    Why what attention returns at padding may reach the tokens of a sequence in a model of library code, or `None`. Then
    it must be what it is in stock.
    """
    modules = list(causal_lm.modules())
    if any(map(torch_compat.is_compiled, modules)):
        return "masks of a compiled model are not seen"
    for module in modules:
        if isinstance(module, PreTrainedModel):
            has_state = (
                model_compat.is_stateful(module) or not architecture.layer_types(module.config) <= _MASKED_LAYERS
            )
            lets_padding_in = has_state and not model_compat.masks_state(module)
            if lets_padding_in or module.config.model_type in model_compat.PADDING_MATTERS:
                return "a state may take padding in"
    return None


def has_old_logps(trainer: Any) -> bool:
    """Return `True` if batches have old log-probs, of generation or of the training forward."""
    if trainers.is_rloo(trainer) or trainers.corrects_sampling(trainer):
        return True
    return why_weights_move(trainer) is not None


def why_old_logps_are_needed(trainer: Any) -> str | None:
    """
    Why old log-probs must be computed during generation; `None` where, until the weights move, the training forward
    gives the same numbers, and nobody else reads them.

    Args:
        trainer (`GRPOTrainer`): before it generates.
    """
    if trainers.is_rloo(trainer) and trainer.beta != 0.0:
        return f"with beta={trainer.beta} RLOO's KL penalty in the reward reads them"
    return (
        trainer._fused.ladder.findings.why_below(Level.WINDOW)
        or why_forwards_differ(trainer.model)
        or why_rows_depend_on_others(trainer.model)
    )


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


def why_reference_is_not_regrouped(trainer: Any, packed: bool) -> str | None:
    """
    Why the reference's log-probs are computed during generation, as TRL does; `None` where they are computed
    afterwards, in the same rows and groups of micro-batches as the policy's.

    Args:
        trainer (`GRPOTrainer`): before it generates.
        packed (`bool`): whether the policy's rows are packed.
    """
    if trainer.beta == 0.0:
        return "there is no reference"
    if trainers.is_rloo(trainer):
        return "RLOO's KL penalty in the reward reads its log-probs"
    if not packed:
        return "rows have TRL's padding, in which all micro-batches have one shape"
    reason = trainer._fused.ladder.findings.why_below(Level.WINDOW) or why_rows_depend_on_others(trainer.model)
    if reason is None and trainer.ref_model is None:
        # TRL shuffles the sequences of a generation batch after the reference's forwards, which draw for each row
        reason = why_forwards_differ(trainer.model, with_adapters=False)
    return reason


def why_no_forecast(trainer: Any) -> str | None:
    """
    Why a batch of the training may have no forecast of its gradients, and after a colon what to change; `None` where
    the gradient of each token follows from the log-probs of its sequence.
    """
    method = replaced_objective(trainer)
    if method is not None:
        return f"what {method} does to the gradient is not known: remove it"
    if objective_of(trainer).top_entropy_quantile < 1.0:
        return "the entropy quantile looks at the whole batch: set top_entropy_quantile=1.0"
    if padding_counts(trainer):
        return "this TRL's luspo counts padding: use TRL 1.10 or newer, or another loss_type"
    return None


def why_zero_grad_sequences_are_not_skipped(trainer: Any, packed: bool) -> str | None:
    """Why `fused_skip_zero_grad_sequences` cannot leave a sequence out of the model, or `None`."""
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss counts every sequence"
    if trainers.beta_of_loss(trainer) != 0.0:
        return f"with beta={trainer.beta} every sequence receives a gradient from the KL term"
    if trl_compat.has_entropy_bonus(trainer):
        return "every sequence receives a gradient from the entropy bonus"
    reason = why_no_forecast(trainer)
    if reason is not None:
        return f"it needs to know which sequences receive a gradient, and {reason}"
    if trainers.loss_type(trainer) == "vespo" and has_old_logps(trainer):
        return "vespo logs a weight of every sequence"
    if not packed:
        return "rows are not packed: only the head leaves them out"
    return None
