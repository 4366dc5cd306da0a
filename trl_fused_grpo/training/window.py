"""Where in an accumulation window a training is, and what is logged once for each window."""

from typing import Any

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
        self.begin()

    def begin(self) -> None:
        """The next training step is the first of a window."""
        self._steps_done = 0
        self._recomputed: list[tuple[int, int]] = []  # rows whose gradients were not as forecast, and all, by forward

    @property
    def begins(self) -> bool:
        """Whether the training step that runs is the first of a window."""
        return self.is_in_step and self._steps_done == 0

    @property
    def steps_left(self) -> int:
        """
        Micro-batches until the weights move, the current one included. Zero outside a training step, where it is not
        known: a loop of the user's own may move them at any time.
        """
        if not self.is_in_step:
            return 0
        if self.trainer.accelerator.sync_gradients:
            return 1
        return max(self.trainer.current_gradient_accumulation_steps - self._steps_done, 1)

    def step_ends(self) -> None:
        """A training step is done."""
        self._steps_done = 0 if self.trainer.accelerator.sync_gradients else self._steps_done + 1

    def count(self, stats: list[FusedStats]) -> None:
        """Count the rows of a forward, whose backward is done."""
        self._recomputed.append((sum(part.recomputed for part in stats), sum(part.rows for part in stats)))

    def log_recomputed(self) -> None:
        """Log the counts of a window's forwards, reduced together: processes wait for one another once."""
        accelerator, counts, self._recomputed = self.trainer.accelerator, self._recomputed, []
        if accelerator.num_processes > 1:
            local = torch.tensor(counts, dtype=torch.float32, device=accelerator.device)
            counts = accelerator.reduce(local, reduction="sum").tolist()
        shares = [recomputed / max(rows, 1) for recomputed, rows in counts]
        trl_compat.metrics_of(self.trainer)["fused/rows_recomputed"].extend(shares)
