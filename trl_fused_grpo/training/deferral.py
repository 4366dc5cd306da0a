"""
Log-probabilities that generation leaves to the training: old ones, which the loss's own forward computes anyway, and
the reference's, which are computed in the forwards that the policy will have, so that equal weights give equal bits.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingMetrics

from .deferred_ratio import DEFERRED, sampling_correction
from .eligibility import why_generation_is_seen, why_not_fused, why_old_logps_are_needed, why_reference_is_not_regrouped
from .engine import LogpsEngine
from .logps import LogpsArgs, LogpsRequest


logger = logging.get_logger(__name__)


class LogpsDeferral:
    """
    Which log-probabilities of a generation batch are left out, and what is left to be done for them.

    Args:
        trainer (`GRPOTrainer`): whose they are.
        engine ([`LogpsEngine`]): computes them.
    """

    def __init__(self, trainer: Any, engine: LogpsEngine):
        self.trainer, self.engine = trainer, engine
        self.is_generating = False
        self._defers_old = self._defers_reference = False
        self._policy_state: Any = None
        self._reference: tuple[LogpsArgs, Any] | None = None
        self._sampling_metrics = SamplingMetrics()

    @contextmanager
    def generation(self, steps_left: int, skip_old: bool, layout: str) -> Generator[None, None, None]:
        """
        While it lasts, TRL generates and logps, and [`takes`] says which log-probabilities it does not get.

        Args:
            steps_left (`int`): micro-batches until the weights move.
            skip_old (`bool`): whether old log-probs may be left to the training.
            layout (`str`): how the policy's rows will be laid out.
        """
        trainer = self.trainer
        is_training = trainer.model.training
        seen = why_generation_is_seen(trainer)
        if is_training and seen is not None and (trainer.use_vllm or trainer.beta != 0.0):
            logger.warning_once(f"Old and reference log-probs are computed where TRL does, because {seen}.")
        self.is_generating = True
        self._defers_old = is_training and skip_old and why_old_logps_are_needed(trainer, steps_left) is None
        is_planned = is_training and steps_left > 0  # outside a training step nobody comes back for what is left out
        self._defers_reference = is_planned and why_reference_is_not_regrouped(trainer, layout) is None
        self._policy_state = model_compat.adapter_state(trainer.model)
        self._reference = None
        try:
            yield
        finally:
            self.is_generating = self._defers_old = self._defers_reference = False

    @property
    def defers_old(self) -> bool:
        """Whether the old log-probs of the generation that runs are left to the training."""
        return self._defers_old

    def takes(self, call: LogpsArgs) -> bool:
        """Whether a call of TRL's, made while it generates, is left to later: whatever it gets is not used."""
        # A reward function may ask too, and reads what it gets
        if not self.is_generating or not trl_compat.is_asked_by_generation():
            return False
        trainer = self.trainer
        state = model_compat.adapter_state(call.model)
        if call.model is not trainer.ref_model and state == self._policy_state:
            return self._defers_old
        is_fused = why_not_fused(trainer, call.model, trainer._engine.causal_lm(call.model)) is None
        if self._defers_reference and is_fused and not call.multimodal:
            self._reference = call, state
            return True
        return False

    def mark_old(self, output: dict[str, Any]) -> None:
        """Mark a generation batch whose old log-probs and ratios the training will compute."""
        self._sampling_metrics = SamplingMetrics()
        metrics = self.trainer._metrics["train"]
        for name in SAMPLING_METRICS:  # TRL's own figures, the last ones, are not true yet
            if metrics.get(name):
                metrics[name].pop()
            if not metrics.get(name):
                metrics.pop(name, None)
        del output["old_per_token_logps"], output["importance_sampling_ratio"]
        output[DEFERRED] = torch.tensor(True)

    def fill_ratio(self, inputs: dict[str, Any], logps: Tensor, step: int) -> None:
        """
        Give TRL the importance ratio that generation left out, before it reads it, and log the sampler's metrics with
        the last micro-batch of a generation batch.

        Args:
            inputs (`dict`): what TRL's `_compute_loss` reads.
            logps (`Tensor`): `[B, T]` of the training forward.
            step (`int`): number of the training step.
        """
        if DEFERRED not in inputs:
            return
        trainer = self.trainer
        steps = int(trainer.args.steps_per_generation)
        place = step % (steps * trainer.num_iterations)
        # Later iterations see the same sequences again
        inputs["importance_sampling_ratio"] = self._ratio(inputs, logps.detach(), place if place < steps else None)
        if place == steps - 1:
            self._log_sampling()

    def _ratio(self, inputs: dict[str, Any], logps: Tensor, place: int | None) -> Tensor:
        values = logps, inputs["sampling_per_token_logps"], trl_compat.loss_mask(self.trainer, inputs)
        correction = sampling_correction(self.trainer)
        ratio = correction.ratio(*values)
        if place is not None:
            self._sampling_metrics.add(place, correction, *values, ratio)
        return ratio

    def _log_sampling(self) -> None:
        for name, value in self._sampling_metrics.gathered(self.trainer.accelerator).items():
            self.trainer._metrics["train"][name].append(value)
        self._sampling_metrics = SamplingMetrics(is_logged=True)

    def settle(self) -> None:
        """
        Compute what was left to a training that was interrupted, as long as the weights are those that generated.
        """
        batches = self._unused_micro_batches()
        first = int(self.trainer.args.steps_per_generation or 1) - len(batches)
        waiting = [(place, batch) for place, batch in enumerate(batches, first) if DEFERRED in batch]
        is_logged = self._sampling_metrics.is_logged
        for place, batch in waiting:
            logps = self._logps_of(batch)
            batch["importance_sampling_ratio"] = self._ratio(batch, logps, place)
            batch["old_per_token_logps"] = logps
            del batch[DEFERRED]
        if waiting and not is_logged:
            self._log_sampling()

    def _unused_micro_batches(self) -> list[dict[str, Any]]:
        """What the training has still to come to of the last generation batch."""
        trainer = self.trainer
        batches: list[dict[str, Any]] = trainer._buffered_inputs or []
        steps = int(trainer.args.steps_per_generation or 1)
        iteration, place = divmod(trainer._step % (steps * trainer.num_iterations), steps)
        if iteration == place == 0:
            return []  # the next step generates
        return batches if iteration < trainer.num_iterations - 1 else batches[place:]

    @torch.no_grad()
    def _logps_of(self, inputs: dict[str, Any]) -> Tensor:
        ids, mask = (
            torch.cat([inputs[left], inputs[right]], dim=1)
            for left, right in (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
        )
        method, length = self.trainer._get_per_token_logps_and_entropies, inputs["completion_ids"].size(1)
        images = {name: inputs[name] for name in trl_compat.MULTIMODAL_INPUTS if name in inputs}
        return method(self.trainer.model, ids, mask, length, **images)[0]

    def score_reference(self, groups: list[list[dict[str, Any]]]) -> None:
        """
        Compute the reference's log-probabilities, where generation left them out.

        Args:
            groups (`list[list[dict]]`): the micro-batches of the generation batch as they go through the model.
        """
        if self._reference is None:
            return
        (call, state), self._reference = self._reference, None
        call = replace(call, batch_size=None)
        with model_compat.adapters_as(call.model, state):
            for group in groups:
                # As of the policy, rows in the same order
                logps_request = LogpsRequest.joined([self.trainer._build_loss_request(batch) for batch in group])
                with torch.no_grad():
                    result = self.engine.compute(logps_request, call.of(group), _no_images)
                sizes = [len(batch["completion_ids"]) for batch in group]
                for batch, logps in zip(group, result.logps.split(sizes), strict=True):
                    batch["ref_per_token_logps"] = logps


def _no_images(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a call with images is not deferred")
