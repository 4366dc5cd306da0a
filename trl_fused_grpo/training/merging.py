"""
Micro-batches that share a forward of the model: the first of them runs it, each takes its log-probabilities and its
loss in a training step of its own, and the last one's backward is that of all.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.layout import Rows

from .eligibility import why_forwards_are_not_shared, why_micro_batches_are_seen, why_not_balanced
from .engine import LogpsEngine
from .logps import PerTokenLogps
from .partitioning import prompt_group_ids, rebalance


logger = logging.get_logger(__name__)


# More tokens than this at once gain little on one H200 (`benchmarks/NOTES.md`)
MAX_TOKENS = 16_384


class MicroBatchMerger:
    """
    Which micro-batches of a generation batch share a forward, their log-probabilities until each is due, and their
    losses until the backward.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        engine ([`LogpsEngine`]): knows its options and how its rows are laid out.
    """

    def __init__(self, trainer: Any, engine: LogpsEngine):
        self.trainer, self.engine = trainer, engine
        self.rebalanced = False
        self.forget()

    def forget(self) -> None:
        """Forget everything, as at the start of a training."""
        self.plan([], [])
        self._losses: list[Tensor] = []

    def plan_generation(self, batches: list[dict[str, Any]], steps_left: int) -> list[dict[str, Any]]:
        """
        Decide which micro-batches of a new generation batch share forwards, and return them, as they are or dealt anew.

        Args:
            batches (`list[dict]`): as TRL has cut them.
            steps_left (`int`): micro-batches until the accumulation window ends.
        """
        trainer, option = self.trainer, self.engine.option
        layout, shares_prompts = self.engine.layout(trainer.model), self.engine.shares_prompts(trainer.model)
        if option("fused_balance", False) and _is_free("fused_balance", why_not_balanced(trainer)):
            dealt = rebalance(batches, layout, shares_prompts)
            self.rebalanced, batches = dealt is not batches, dealt
        seen = why_micro_batches_are_seen(trainer)
        if seen is not None:
            logger.warning_once(f"Every micro-batch has a forward of its own, because {seen}.")
        limit, ends = option("fused_max_tokens_per_forward", None), []
        if _is_free("fused_max_tokens_per_forward" if limit else None, why_forwards_are_not_shared(trainer, layout)):
            ends = plan_merges(batches, default_token_budget(batches) if limit is None else limit, shares_prompts)
            if trainer.accelerator.num_processes > 1:  # every process must call the model at the same steps
                table = torch.tensor([ends], device=trainer.accelerator.device)
                ends = trainer.accelerator.gather(table).amin(0).tolist()
        self.plan(batches, ends)
        return batches

    def plan(self, batches: list[dict[str, Any]], ends: list[int]) -> None:
        """
        Prepare for a new generation batch.

        Args:
            batches (`list[dict]`): its micro-batches.
            ends (`list[int]`): for each, the last one that may share a forward which begins there; empty: none share.
        """
        self._batches, self._ends = batches, ends
        self._logps: dict[int, PerTokenLogps] = {}
        self._last = -1

    def place_of(self, inputs: dict[str, Any]) -> int | None:
        """Where these inputs stand in the generation batch, by identity; `None` for others."""
        return next((place for place, batch in enumerate(self._batches) if batch is inputs), None)

    def together(self, inputs: dict[str, Any], steps_left: int) -> list[dict[str, Any]]:
        """
        The micro-batches that share a forward which begins with `inputs`, these first.

        Args:
            inputs (`dict`): a micro-batch of the trainer.
            steps_left (`int`): micro-batches until the accumulation window ends, this one included.
        """
        place = self.place_of(inputs)
        if place is None or not self._ends:
            return [inputs]
        end = min(self._ends[place], place + steps_left - 1)
        return [inputs, *self._batches[place + 1 : end + 1]]

    def groups(self, steps_left: int) -> list[list[dict[str, Any]]]:
        """
        All micro-batches of the generation batch as they will go through the model.

        Args:
            steps_left (`int`): micro-batches until the current accumulation window ends.
        """
        window = self.trainer.args.gradient_accumulation_steps
        groups, place = [], 0
        while place < len(self._batches):
            if steps_left == 0:
                steps_left = window
            groups.append(self.together(self._batches[place], steps_left))
            place += len(groups[-1])
            steps_left -= len(groups[-1])
        return groups

    def keep(self, inputs: dict[str, Any], logps: list[PerTokenLogps]) -> None:
        """Keep the log-probabilities of micro-batches that shared a forward, from `inputs` on."""
        place = self.place_of(inputs)
        if place is not None and len(logps) > 1:
            self._logps = dict(enumerate(logps, place))
            self._last = max(self._logps)

    def logps_of(self, inputs: dict[str, Any]) -> PerTokenLogps | None:
        """The log-probabilities that a forward before has left for these inputs, once; `None` where it has not."""
        place = self.place_of(inputs)
        return None if place is None else self._logps.pop(place, None)

    @property
    def is_waiting(self) -> bool:
        """Whether losses wait for the last micro-batch of their forward."""
        return bool(self._losses)

    def backward(self, loss: Tensor, inputs: dict[str, Any], is_window_end: bool, backward: Callable) -> None:
        """
        Run the backward of a loss now, with those that wait for it, or keep it for the last of its forward.

        Args:
            loss (`Tensor`): a scalar, as TRL hands it to the backward.
            inputs (`dict`): its micro-batch.
            is_window_end (`bool`): whether the weights move after it.
            backward (`Callable`): the accelerator's.
        """
        self._losses.append(loss)
        place = self.place_of(inputs)
        if place is not None and place < self._last and not is_window_end:
            return
        losses, self._losses = self._losses, []
        self._logps, self._last = {}, -1
        backward(losses[0] if len(losses) == 1 else torch.stack(losses).sum())


@contextmanager
def reducing_gradients(model: nn.Module) -> Generator[None, None, None]:
    """
    While it lasts, a forward under DDP's `no_sync` prepares for gradients to be reduced: the backward of a shared
    forward runs in a later step, which reduces them.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with temporary_attr(model, "require_backward_grad_sync", True):
        yield


def _is_free(asked_for: str | None, reason: str | None) -> bool:
    """Whether there is no reason against something; where it was asked for, the reason is logged once."""
    if reason is not None and asked_for is not None:
        logger.warning_once(f"{asked_for} has no effect, because {reason}.")
    return reason is None


def default_token_budget(batches: list[dict[str, Any]]) -> int:
    """Tokens that a forward may have unless told otherwise: as many as TRL's padded micro-batch, or enough."""
    prompt_ids, completion_ids = batches[0]["prompt_ids"], batches[0]["completion_ids"]
    return min(prompt_ids.numel() + completion_ids.numel(), MAX_TOKENS)


def plan_merges(batches: list[dict[str, Any]], limit: int, share_prompts: bool) -> list[int]:
    """
    For each micro-batch of a generation batch, the last one that a forward which begins there may hold. Rows with holes
    in their masks keep TRL's padding, and go through the model as TRL has them.

    Args:
        batches (`list[dict]`): the micro-batches, all of one width.
        limit (`int`): most tokens of a forward of several.
        share_prompts (`bool`): whether a prompt counts once.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    rows = len(prompt_ids)
    prompts = prompt_group_ids(prompt_ids, prompt_mask) if share_prompts else list(range(rows))
    scored, mask = completion_mask.bool(), torch.cat([prompt_mask, completion_mask], dim=1)
    wanted = scored.any(1)
    laid_out = Rows(mask, mask, completion_mask.shape[1], scored, wanted)  # token ids do not matter
    holes = laid_out.with_holes(mask.bool() & wanted.unsqueeze(1))
    prompt_lengths, lengths, has_holes = torch.stack([prompt_mask.sum(1), completion_mask.sum(1), holes]).tolist()
    if any(has_holes):
        return list(range(len(batches)))
    partitions = torch.arange(rows).split([len(batch["prompt_ids"]) for batch in batches])

    ends = []
    for start in range(len(batches)):
        tokens, seen, end = 0, set(), start
        for number, partition in enumerate(partitions[start:], start):
            for row in partition.tolist():
                tokens += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
                seen.add(prompts[row])
            if tokens > limit:
                break
            end = number
        ends.append(end)
    return ends
