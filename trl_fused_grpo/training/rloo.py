"""
What RLOO's loss asks for, and its old log-probs where generation leaves them to the training.

TRL computes old log-probs for every generation batch. The KL penalty in the reward reads them, at `beta=0.0` the loss
alone. Until the weights move, a forward for them computes those of the training forward once more: it is left out
(`deferral.py`), and the ratio is one.
"""

from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.loss.rloo import rloo_forecast, rloo_objective

from .deferred_ratio import DEFERRED, DeferredRatio
from .logps_request import LogpsRequest, LossCall, PerTokenLogps


def build_rloo_request(trainer: Any, inputs: dict[str, Any], skip_zero_grad: bool) -> LogpsRequest:
    """
    Decide which positions of a micro-batch to project for RLOO's loss, and forecast their gradients.

    Args:
        trainer (`RLOOTrainer`): whose loss it is.
        inputs (`dict`): the micro-batch as TRL's `_compute_loss` gets it.
        skip_zero_grad (`bool`): whether sequences that can receive no gradient may be left out.
    """
    mask = inputs["completion_mask"]  # [B, T]
    if not torch.is_grad_enabled():
        return LogpsRequest(mask)
    old_logps = None if DEFERRED in inputs else inputs["old_logps"]  # [B]
    objective = rloo_objective(trainer.epsilon_low, trainer.epsilon_high)
    forecast = rloo_forecast(objective, mask, inputs["advantages"], old_logps)
    fill = None
    if old_logps is not None:  # sequences that are left out then have a ratio of one
        fill = old_logps.unsqueeze(1) * mask / mask.sum(1, keepdim=True).clamp(min=1)  # [B, T]
    skippable = torch.ones_like(mask[:, 0], dtype=torch.bool) if skip_zero_grad else None
    return LogpsRequest(mask, fill, forecast, skippable=skippable)


class DeferredOldLogps(DeferredRatio):
    """RLOO's old log-probs in the place of the importance ratios of [`DeferredRatio`]: no metric is made of them."""

    def mark(self, output: dict[str, Any], correction: Any = None) -> None:
        del output["old_logps"]
        output[DEFERRED] = torch.tensor(True)

    def fill(self, loss_call: LossCall, result: PerTokenLogps, counts: bool = True) -> None:
        if DEFERRED in loss_call.inputs:
            self._fill(loss_call.inputs, result.logps)
            if counts and DEFERRED in loss_call.micro_batch:
                self._fill(loss_call.micro_batch, result.logps)

    def take(self, micro_batch: dict[str, Any], place: int, logps: Tensor) -> None:
        self._fill(micro_batch, logps)

    def _fill(self, batch: dict[str, Any], logps: Tensor) -> None:
        batch["old_logps"] = (logps.detach() * batch["completion_mask"]).sum(1)
        del batch[DEFERRED]
