"""Work that an accumulation window need not do: when, and how it is left out."""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from .layout import LayoutName, deal, prompt_numbers
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


def balance(batches: list[dict[str, Any]], layout: LayoutName, share_prompts: bool) -> list[dict[str, Any]]:
    """
    Deal the sequences of a generation batch anew into its micro-batches, each as large as before: about equal in tokens
    where rows are packed, those of one prompt together where they share it, and alike in length where they are padded
    to the longest.

    Batches with anything but one tensor row or scalar per sequence are returned as they are.
    """
    if layout == "host" or len(batches) == 1:
        return batches
    size = len(batches[0]["completion_ids"])
    rows = {k for k, v in batches[0].items() if isinstance(v, Tensor) and v.dim() > 0}
    others = {k for k, v in batches[0].items() if not isinstance(v, Tensor) and v is not None}
    if others or any(len(batch[k]) != size for batch in batches for k in rows):
        return batches
    whole = {k: torch.cat([batch[k] for batch in batches]) for k in rows}
    lengths = whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)
    if layout == "aligned":
        hands = lengths.argsort(stable=True).view(len(batches), size).tolist()
    else:
        prompts = prompt_numbers(whole["prompt_ids"], whole["prompt_mask"]) if share_prompts else None
        hands = deal(lengths.tolist(), len(batches), size, prompts)
    return [
        {**batch, **{k: whole[k][torch.tensor(hand, device=whole[k].device)] for k in rows}}
        for batch, hand in zip(batches, hands, strict=True)
    ]
