"""
Micro-batches that share a forward of the model. The first of them runs it. Each takes its log-probs and its loss in a
training step of its own. The backward of all runs with the last of them.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._utils import temporary_attr

from .agreement import images_anywhere, of_all_processes
from .checks import log_no_effect
from .engine import LogpsEngine
from .logps_request import PerTokenLogps, images_of
from .memory import free_memory, limits_in_budget, token_limits, why_memory_is_taken
from .partitioning import plan_merges
from .plan import why_forwards_are_not_shared
from .randomness import RandomStates


logger = logging.get_logger(__name__)


class MicroBatchMerger:
    """
    Decides which micro-batches of a generation batch share a forward. Keeps their log-probs until each has its step,
    and their losses until the backward.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        engine ([`LogpsEngine`]): knows its options and how its rows are laid out.
    """

    def __init__(self, trainer: GRPOTrainer, engine: LogpsEngine):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self._most_together = sys.maxsize  # micro-batches in a forward
        self.reset()

    def reset(self) -> None:
        """Forget all micro-batches, as at the start of a training."""
        self.set_plan([], [])
        self._losses: list[Tensor] = []

    def begin_window(self) -> None:
        """
        Forget what an accumulation window has left that was not finished. Where memory runs out in it and
        `auto_find_batch_size` begins the training anew, its gradients are gone in stock too.
        """
        self._losses = []
        self._forget_forward()

    def _forget_forward(self) -> None:
        """Forget the forward that micro-batches share, and those of its log-probs that were not taken."""
        self._logps: dict[int, PerTokenLogps] = {}
        self._last = -1

    @contextmanager
    def training(self) -> Generator[None, None, None]:
        """While it lasts, TRL trains. Before, and in the end, however it comes, all micro-batches are forgotten."""
        self.reset()
        try:
            yield
        finally:
            self.reset()  # an exception leaves losses that wait; their graphs keep memory, and attention replaced

    def plan_generation(self, batches: list[dict[str, Any]]) -> None:
        """Decide which micro-batches of a new generation batch, as TRL has split it, share forwards."""
        trainer, options = self.trainer, self.engine.options
        causal_lm = self.engine.causal_lm(trainer.model)
        has_images = images_anywhere(trainer.accelerator, causal_lm, any(map(images_of, batches)))
        packed = self.engine.packs(trainer.model)
        shares_prompts = self.engine.shares_prompts(trainer.model)
        asked_for = "fused_max_tokens_per_forward" if options.fused_max_tokens_per_forward else None
        log_no_effect(asked_for, reason := why_forwards_are_not_shared(trainer, packed))
        limits_of = token_limits(self.engine, has_images) if reason is None else None
        ends = ends_of_first = []
        if limits_of is not None:
            padded = batches[0]["prompt_ids"].numel() + batches[0]["completion_ids"].numel()
            limits = limits_in_budget(limits_of(padded), self.engine)
            plans = plan_merges(batches, limits, shares_prompts)
            # All must call the model at the same steps
            agreed = of_all_processes(trainer.accelerator, "shared forwards", sum(plans, [])).amin(0)  # noqa: RUF017 - two lists
            ends_of_first, ends = agreed.view(2, -1).tolist()
        self.set_plan(batches, ends, ends_of_first)

    def set_plan(self, batches: list[dict[str, Any]], ends: list[int], ends_of_first: list[int] | None = None) -> None:
        """
        Replace the plan by that of a new generation batch. Log-probs of the one before are dropped.

        Args:
            batches (`list[dict]`): its micro-batches.
            ends (`list[int]`):
                For each, the index of the last one that may share its forward. Where the list is empty, each has a
                forward of its own.
            ends_of_first (`list[int]`, *optional*): the same as `ends` where an accumulation window begins.
        """
        self._batches, self._ends, self._ends_of_first = batches, ends, ends_of_first or ends
        self._forget_forward()

    def group_of(self, inputs: dict[str, Any], steps_left: int, finds_no_gradients: bool) -> list[dict[str, Any]]:
        """
        The micro-batches that share a forward whose first one is `inputs`, in order.

        Args:
            inputs (`dict`): a micro-batch of the trainer. One that is not of the generation batch is alone.
            steps_left (`int`): micro-batches until the accumulation window ends, this one included.
            finds_no_gradients (`bool`): whether the window begins with it, and no weight has a gradient.
        """
        index = self._index_of(inputs)
        if index is None or not self._ends:
            return [inputs]
        end = (self._ends_of_first if finds_no_gradients else self._ends)[index]
        end = min(end, index + min(steps_left, self._most_together) - 1)
        return [inputs, *self._batches[index + 1 : end + 1]]

    def groups(self, steps_left: int, begins_window: bool) -> list[list[dict[str, Any]]]:
        """
        All micro-batches of the generation batch, grouped by the forward that they will share.

        Args:
            steps_left (`int`): micro-batches until the current accumulation window ends.
            begins_window (`bool`): whether it begins with the first of them.
        """
        groups, index = [], 0
        while index < len(self._batches):
            if steps_left == 0:
                steps_left, begins_window = self.trainer.args.gradient_accumulation_steps, True
            groups.append(self.group_of(self._batches[index], steps_left, begins_window))
            begins_window = False
            index += len(groups[-1])
            steps_left -= len(groups[-1])
        return groups

    def find_no_gradients(self, inputs: dict[str, Any]) -> bool:
        """
        Return `True` if no weight of any process has a gradient, where a window that begins so has a larger forward
        then.
        """
        index = self._index_of(inputs)
        if index is None or not self._ends or self._ends_of_first[index] == self._ends[index]:
            return False
        reason = why_memory_is_taken(self.trainer, self.engine.causal_lm(self.trainer.model))
        if reason is not None:
            logger.warning_once(f"The first forward of a window has no more tokens than others, because {reason}.")
        return bool(of_all_processes(self.trainer.accelerator, "memory of gradients", [reason is None]).all())

    def fitting(
        self, group: list[dict[str, Any]], compute: Callable[[list[dict[str, Any]]], PerTokenLogps]
    ) -> tuple[list[dict[str, Any]], PerTokenLogps]:
        """
        The micro-batches of a group, and what `compute` returns for them. Where the device's memory runs out, the first
        alone, and from now on each.

        Raises:
            `torch.OutOfMemoryError`: where one alone does not fit, or other processes would wait for the forward that
                this one did not run.
        """
        before = RandomStates(group[0]["completion_ids"])
        try:
            return group, compute(group)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
            self._tell_memory_ran_out(len(group))
            if self.trainer.accelerator.num_processes > 1:
                raise
        self._most_together = 1
        before.restore()
        free_memory()
        return group[:1], compute(group[:1])

    def _tell_memory_ran_out(self, count: int) -> None:
        logger.warning(
            f"Memory ran out where {count} micro-batches share a forward: fused_max_tokens_per_forward sets how many "
            "tokens may (0 runs each alone), and fused_memory how much memory is taken."
        )

    def keep(self, inputs: dict[str, Any], logps: list[PerTokenLogps]) -> None:
        """Keep the log-probs of micro-batches that shared a forward, the first of which is `inputs`."""
        index = self._index_of(inputs)
        if index is not None and len(logps) > 1:
            self._logps = dict(enumerate(logps, index))
            self._last = max(self._logps)

    def take_logps(self, inputs: dict[str, Any]) -> PerTokenLogps | None:
        """Remove and return the log-probs that an earlier forward left for these inputs, or `None`."""
        index = self._index_of(inputs)
        return None if index is None else self._logps.pop(index, None)

    @property
    def is_waiting(self) -> bool:
        """Return `True` if losses wait for the last micro-batch of their forward."""
        return bool(self._losses)

    def backward(self, loss: Tensor, inputs: dict[str, Any], is_last: bool, backward: Callable) -> None:
        """
        Run the backward of a loss together with those that wait for it, or keep the loss for the last micro-batch of
        its forward.

        Args:
            loss (`Tensor`): a scalar, as TRL gives it to the backward.
            inputs (`dict`): its micro-batch.
            is_last (`bool`): whether none waits behind it, see [`AccumulationWindow.is_last`].
            backward (`Callable`): the accelerator's.
        """
        self._losses.append(loss)
        index = self._index_of(inputs)
        if index is not None and index < self._last and not is_last:
            return
        losses, self._losses = self._losses, []
        self._forget_forward()
        try:
            backward(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        except torch.OutOfMemoryError:
            if len(losses) > 1:
                self._tell_memory_ran_out(len(losses))
            raise
        if self.engine.memory is not None:
            self.engine.memory.learn()

    def _index_of(self, inputs: dict[str, Any]) -> int | None:
        """The index of these inputs in the generation batch, by identity; `None` for others."""
        return next((index for index, batch in enumerate(self._batches) if batch is inputs), None)


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
