"""Work that an accumulation window need not do: when, and how it is left out."""

from typing import Any

from trl import GRPOTrainer

from . import _trl_compat as compat
from .question import has_own_objective


# Logged means over micro-batches, or how their names begin: they depend on the cut, which is a random one in the host
MEANS_OVER_MICRO_BATCHES = ("entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/")


def why_old_logps_are_needed(trainer: GRPOTrainer) -> str | None:
    """
    Why old log-probs must be computed before training, or `None` where the training pass computes the same numbers: the
    weights do not move between generation and loss.
    """
    args: Any = trainer.args
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return "the host decides"
    if has_own_objective(trainer):
        return "a subclass's objective may read them"
    if args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0:
        return "the weights move while a generation batch is in use"
    return None


def why_not_balanced(trainer: GRPOTrainer) -> str | None:
    """Why sequences may not be dealt into micro-batches anew; `None` where the cut does not matter."""
    args: Any = trainer.args
    if has_own_objective(trainer):
        return "a subclass's objective may depend on the cut"
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


def why_passes_are_not_shared(trainer: GRPOTrainer) -> str | None:
    """Why micro-batches of packed rows may not share a pass of the model; `None` where they may."""
    if has_own_objective(trainer):
        return "a subclass's objective may call the model"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is adapted where an accumulation window ends"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary loss is computed in each micro-batch"
    if trainer.is_deepspeed_enabled and compat.DEEPSPEED_STEPS_WITH_BACKWARD:
        return "DeepSpeed counts backwards under this version of Accelerate"
    return None
