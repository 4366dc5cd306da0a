"""Where in an accumulation window a training is, and what is logged once for each window."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from trl import GRPOTrainer

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.ops.linear_logps import FusedStats


class AccumulationWindow:
    """
    Counts the training steps of an accumulation window.

    Args:
        trainer (`GRPOTrainer`): which accumulates gradients.

    Attributes:
        is_in_step (`bool`): whether a training step runs.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.is_in_step = False
        self._forwards: list[list[FusedStats]] = []
        self._epoch: Callable[[], Any] = _nothing  # a reference to its iterator, which may hold processes
        self.begin()

    def begin(self, epoch: Any = None) -> None:
        """
        TRL takes the micro-batches of the next window.

        Args:
            epoch (`Iterator`, *optional*): of the epoch, from which they come. By default a loop is not TRL's.
        """
        self._steps_done = 0
        if epoch is not None and self._epoch() is epoch:
            return
        self._epoch = _reference(epoch)
        self._steps_of_epoch = self._steps_since_update = 0
        self._recomputed: list[tuple[int, int]] = []  # rows whose gradients were not as forecast, and all, by forward
        # Before the first step of a resumed epoch there were whole windows; how many, is not known
        is_resumed = epoch is not None and (self.trainer.state.epoch or 0.0) % 1.0 != 0.0
        self._only_with = self.trainer.args.gradient_accumulation_steps if is_resumed else None

    @property
    def begins(self) -> bool:
        """Return `True` if the training step that runs is the first of a window."""
        return self.is_in_step and self._steps_since_update == 0

    @property
    def is_stopped(self) -> bool:
        """
        Return `True` if the training step that runs is the last one of an epoch or a training that somebody has
        stopped. Gradients stay then, and those of the next epoch are added.
        """
        return self.trainer.control.should_epoch_stop or self.trainer.control.should_training_stop

    @property
    def is_last(self) -> bool:
        """
        Return `True` if what waits has its backward in this training step: the weights move after it, or it is stopped.
        """
        return self.trainer.accelerator.sync_gradients or self.is_stopped

    @property
    def steps_left(self) -> int:
        """
        Micro-batches until the weights move, the current one included, or fewer where they come from two windows. Zero
        outside a training step, where it is not known: a loop of the user's own may move them at any time.
        """
        if not self.is_in_step:
            return 0
        accumulation = self.trainer.args.gradient_accumulation_steps
        if self.trainer.accelerator.sync_gradients or self._only_with not in (None, accumulation):
            return 1
        left = self.trainer.current_gradient_accumulation_steps - self._steps_done
        if self._epoch() is not None:
            # The weights move at its multiples in an epoch, also where a callback has changed it within the epoch
            left = min(left, accumulation - self._steps_of_epoch % accumulation)
        return max(left, 1)

    @property
    def stats(self) -> list[FusedStats]:
        """Of the forwards with gradients of the last training step, one for each sub-batch."""
        return [part for of_forward in self._forwards for part in of_forward]

    def step_begins(self, goes_on: bool) -> None:
        """A training step begins. It `goes_on` with the forward of the step before when micro-batches share one."""
        if not goes_on:
            self._forwards = []

    def keep_stats(self, of_forward: list[FusedStats]) -> None:
        """Keep the stats of a forward, to which its backward may add some. An objective may run several in a step."""
        self._forwards = [*(self._forwards if self.is_in_step else ()), of_forward]

    def step_ends(self) -> None:
        """A training step is done."""
        moved = self.trainer.accelerator.sync_gradients
        is_new_window = moved and self._epoch() is None
        self._steps_done = 0 if is_new_window else self._steps_done + 1
        self._steps_since_update = 0 if moved else self._steps_since_update + 1
        self._steps_of_epoch += 1

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


def _nothing() -> None:
    return None


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return _nothing if value is None else ref(value)
    except TypeError:  # such as the iterator of a list, which holds no processes
        return lambda: value
