"""
Where in an accumulation window a training is, and the forwards that its micro-batches share. The first micro-batch of a
forward runs it. Each takes its log-probs and its loss in a training step of its own. The backward of all runs with the
last of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import of_all_processes, temporary_attr
from trl_fused_grpo.ops.linear_logps import FusedStats

from .engine import LogpsEngine, RandomStates
from .memory import why_memory_is_taken
from .plan import Plan
from .requests import PerTokenLogps


logger = logging.get_logger(__name__)


class AccumulationWindow:
    """Counts the training steps of an accumulation window."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.is_in_train = self.is_in_step = False
        self.stats: list[FusedStats] = []  # of the last training step's forwards with gradients, for each sub-batch
        self._epoch: Any = None  # its iterator
        self.begin()

    def begin(self, epoch: Any = None) -> None:
        """TRL takes the micro-batches of the next window."""
        self._steps_done = 0
        if epoch is not None and self._epoch is epoch:
            return
        self._epoch = epoch
        self._recomputed: list[tuple[int, int]] = []  # rows whose gradients were not as forecast, and all, by forward
        # That of the epoch, `None` where it is not known. Where a callback changes it, windows end elsewhere until the
        # next epoch
        self._accumulation = None if epoch is None else self.trainer.args.gradient_accumulation_steps

    @property
    def begins(self) -> bool:
        """Return `True` if the training step that runs is the first of a window."""
        return self.is_in_step and self._steps_done == 0

    @property
    def is_last(self) -> bool:
        """
        Return `True` if what waits has its backward in this training step: the weights move after it, or it is the last
        one of an epoch or a training that somebody has stopped. Gradients stay then, and those of the next epoch are
        added.
        """
        control = self.trainer.control
        is_stopped = control.should_epoch_stop or control.should_training_stop
        return self.trainer.accelerator.sync_gradients or is_stopped

    @property
    def steps_left(self) -> int:
        """
        Micro-batches until the weights move, the current one included. One where that is not known, as in a loop of the
        user's own, which may move them after each micro-batch or change gradients. Zero outside a training step.
        """
        if not self.is_in_step:
            return 0
        is_known = self.is_in_train and self._accumulation == self.trainer.args.gradient_accumulation_steps
        if self.is_last or not is_known:
            return 1
        return max(self.trainer.current_gradient_accumulation_steps - self._steps_done, 1)

    def keep_stats(self, of_forward: list[FusedStats]) -> None:
        """Keep the stats of a forward. An objective may run several in a step."""
        self.stats = [*(self.stats if self.is_in_step else ()), *of_forward]

    def step_ends(self) -> None:
        """A training step is done."""
        moved, self._steps_done = self.trainer.accelerator.sync_gradients, self._steps_done + 1
        if moved and self._epoch is None:
            self._steps_done = 0
        elif moved and self._steps_done != self.trainer.current_gradient_accumulation_steps:
            self._accumulation = None  # until the next epoch

    def count(self) -> None:
        """Count the rows of a training step's forwards, whose backward is done."""
        self._recomputed.append((sum(part.recomputed for part in self.stats), sum(part.rows for part in self.stats)))

    def log_recomputed(self) -> None:
        """Log the counts of a window's forwards, reduced together: processes wait for one another once."""
        accelerator, counts, self._recomputed = self.trainer.accelerator, self._recomputed, []
        if accelerator.num_processes > 1:
            local = torch.tensor(counts, dtype=torch.float32, device=accelerator.device)
            counts = accelerator.reduce(local, reduction="sum").tolist()
        shares = [recomputed / max(rows, 1) for recomputed, rows in counts]
        trl_compat.metrics_of(self.trainer)["fused/rows_recomputed"].extend(shares)


class SharedForwards:
    """
    Follows the plan of a generation batch. Keeps the log-probs of a forward until each micro-batch has its step, and
    their losses until the backward.
    """

    def __init__(self, trainer: GRPOTrainer, engine: LogpsEngine):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self._has_run_out_of_memory, self.steps_ahead = False, 0
        self.reset()

    def reset(self) -> None:
        """Forget all micro-batches, as at the end of a training."""
        self.plan = Plan()
        self.begin_window()

    def follow(self, plan: Plan) -> None:
        """Replace the plan by that of a new generation batch. Log-probs of the one before are dropped."""
        self.plan, self._logps = plan, {}

    def begin_window(self) -> None:
        """
        Forget what an accumulation window has left that was not finished. Where memory runs out in it and
        `auto_find_batch_size` begins the training anew, its gradients are gone in stock too.
        """
        self._losses: list[Tensor] = []
        self._logps: dict[int, PerTokenLogps] = {}  # that were not taken yet, by the place of their micro-batch

    def sharing(self, micro_batch: dict[str, Any], steps_left: int) -> list[dict[str, Any]]:
        """The micro-batches that share the forward that begins with `micro_batch`, as planned if there is memory."""
        place = self._place_of(micro_batch)
        forward = None if place is None else self.plan.forward_at(place)
        if forward is None or not 1 < len(forward.places) <= steps_left or self._has_run_out_of_memory:
            return [micro_batch]
        has_memory = not forward.needs_free_gradients or self._finds_no_gradients()
        return self.plan.sharing(forward) if has_memory else [micro_batch]

    def _finds_no_gradients(self) -> bool:
        """Return `True` if no weight of any process has a gradient."""
        reason = why_memory_is_taken(self.trainer, self.engine.causal_lm(self.trainer.model))
        if reason is not None:
            logger.warning_once(f"The first micro-batches of a window have a forward each, because {reason}.")
        return bool(of_all_processes(self.trainer.accelerator, "memory of gradients", [reason is None]).all())

    def run(
        self, sharing: list[dict[str, Any]], compute: Callable[[list[dict[str, Any]]], PerTokenLogps]
    ) -> PerTokenLogps:
        """
        Run a forward with `compute`, keep the log-probs of all micro-batches that share it, and return those of the
        first. Where the device's memory runs out, the first alone, and from now on each.
        """
        before = RandomStates(sharing[0]["completion_ids"])
        try:
            result = compute(sharing)
        except torch.OutOfMemoryError:
            if len(sharing) == 1:
                raise
            self._tell_memory_ran_out(len(sharing))
            if self.trainer.accelerator.num_processes > 1:
                raise
            self._has_run_out_of_memory, sharing = True, sharing[:1]
            result = None
        if result is None:  # the exception, which holds the graph, is gone
            before.restore()
            clear_device_cache(garbage_collection=True)
            result = compute(sharing)
        if len(sharing) == 1:
            return result
        place = self._place_of(sharing[0])
        assert place is not None, "micro-batches that share a forward are planned"
        results = result.split([len(batch["completion_ids"]) for batch in sharing])
        self._logps = dict(enumerate(results[1:], place + 1))
        return results[0]

    def _tell_memory_ran_out(self, count: int) -> None:
        logger.warning(
            f"Memory ran out where {count} micro-batches share a forward: fused_max_tokens_per_forward sets how many "
            "tokens may (0 runs each alone), and fused_memory how much memory is taken."
        )

    def planned_micro_batch(self) -> dict[str, Any] | None:
        """The micro-batch of this training step, if a forward of the plan that it follows begins there."""
        is_planned = self._place > 0 and self.plan.forward_at(self._place) is not None
        return self.plan.micro_batch(self._place) if is_planned else None

    def keep_logps(self, logps: PerTokenLogps) -> None:
        """Keep the log-probs of the micro-batch of this training step."""
        self._logps[self._place] = logps

    def take_logps(self, micro_batch: dict[str, Any]) -> PerTokenLogps | None:
        """Remove and return the log-probs that an earlier forward left for a micro-batch, or `None`."""
        place = self._place_of(micro_batch)
        return None if place is None else self._logps.pop(place, None)

    @property
    def has_logps_of_step(self) -> bool:
        """Return `True` if an earlier forward left the log-probs for this training step."""
        return self._place in self._logps

    @property
    def is_waiting(self) -> bool:
        """Return `True` if losses wait for the last micro-batch of their forward."""
        return bool(self._losses)

    def backward(self, loss: Tensor, is_last: bool, backward: Callable) -> None:
        """
        Run the backward of a loss together with those that wait for it, or keep the loss until all micro-batches of its
        forward have taken their log-probs.
        """
        self._losses.append(loss)
        if self._logps and not is_last:
            return
        losses, self._losses, self._logps = self._losses, [], {}
        try:
            backward(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        except torch.OutOfMemoryError:
            if len(losses) > 1:
                self._tell_memory_ran_out(len(losses))
            raise
        if self.engine.memory is not None:
            self.engine.memory.learn()

    @property
    def _place(self) -> int:
        """The place of this training step in the plan."""
        step = trl_compat.step_of(self.trainer) + self.steps_ahead
        return step % trl_compat.steps_of_generation_batch(self.trainer)

    def _place_of(self, micro_batch: dict[str, Any]) -> int | None:
        """The place in the plan of what TRL trains on; `None` for other inputs, such as a copy."""
        is_planned = bool(self.plan.micro_batches) and self.plan.micro_batch(self._place) is micro_batch
        return self._place if is_planned else None


def reducing_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """
    While it lasts, a forward under DDP's `no_sync` prepares for gradients to be reduced: the backward of a shared
    forward runs in a later step, which reduces them.
    """
    is_ddp = isinstance(model, DistributedDataParallel)
    return temporary_attr(model, "require_backward_grad_sync", True) if is_ddp else nullcontext()
