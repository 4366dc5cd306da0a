"""
vLLM's importance ratio, where generation leaves it to the training. On-policy, a forward for old log-probs computes
those of the training forward once more. So it is left out (`deferral.py`), and the ratio is computed here from the
training forward, with the formula of `loss/importance_sampling.py`.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics

from .exchange_plan import GENERATED_BY
from .logps_request import LossCall, PerTokenLogps, prompts_and_completions


# Marks micro-batches whose importance ratio generation left to the training
DEFERRED = "importance_sampling_ratio_from_training"


def sampling_correction(trainer: GRPOTrainer) -> SamplingCorrection:
    """The trainer's vLLM importance-sampling correction."""
    clip_min, clip_max = trl_compat.sampling_clip_range(trainer)
    return SamplingCorrection(
        mode=trainer.vllm_importance_sampling_mode,
        clip_min=clip_min,
        clip_max=clip_max,
        nan_ratio_is_one=trl_compat.NAN_RATIO_IS_ONE,
    )


class DeferredRatio:
    """
    Computes the importance ratios that generation left out, and logs the metrics that TRL logs of them.

    Args:
        trainer (`GRPOTrainer`): whose ratios they are.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self._metrics = SamplingMetrics()

    def mark(self, output: dict[str, Any]) -> None:
        """Mark a generation batch whose old log-probs and ratios the training will compute."""
        self._metrics = SamplingMetrics()
        logged = trl_compat.metrics_of(self.trainer)
        for name in SAMPLING_METRICS:  # TRL has just logged them, from log-probs that were not computed
            if logged.get(name):
                logged[name].pop()
            if not logged.get(name):
                logged.pop(name, None)
        del output["old_per_token_logps"], output["importance_sampling_ratio"]
        output[DEFERRED] = torch.tensor(True)

    def fill(self, loss_call: LossCall, result: PerTokenLogps, counts: bool = True) -> None:
        """
        Put the ratio into what TRL reads of a marked micro-batch, before TRL reads it. From then on the micro-batch is
        one that TRL made, with old log-probs, for the case that the weights move before it is used again: somebody may
        raise `num_iterations` meanwhile. With the last micro-batch of a generation batch the metrics are logged.

        Args:
            loss_call ([`LossCall`]): of TRL's `_compute_loss`.
            result ([`PerTokenLogps`]): of the training forward.
            counts (`bool`): whether the call is that of the training. Another leaves the micro-batch as it is.
        """
        inputs, logps = loss_call.inputs, result.logps.detach()
        if DEFERRED not in inputs:
            return
        if not counts:
            inputs["importance_sampling_ratio"] = self._ratio(inputs, logps, None)
            return
        steps = trl_compat.steps_per_generation(self.trainer)
        place = trl_compat.step_of(self.trainer) % steps
        ratio = self._ratio(inputs, logps, place, result.left_out)
        inputs["importance_sampling_ratio"] = ratio
        if loss_call.micro_batch.pop(DEFERRED, None) is not None:
            loss_call.micro_batch.update(importance_sampling_ratio=ratio, old_per_token_logps=logps)
        if place == steps - 1:
            self._log()

    def resolve(self) -> None:
        """
        Compute what was left to a training that was interrupted. The weights must still be those that generated, as
        they are when the next training begins.
        """
        batches = self._unused_micro_batches()
        first = trl_compat.steps_per_generation(self.trainer) - len(batches)
        marked = [(place, batch) for place, batch in enumerate(batches, first) if DEFERRED in batch]
        is_logged = self._metrics.is_logged
        for place, batch in marked:
            logps = self._logps_of(batch)
            batch["importance_sampling_ratio"] = self._ratio(batch, logps, place)
            batch["old_per_token_logps"] = logps
            del batch[DEFERRED]
        if marked and not is_logged:
            self._log()

    def _ratio(
        self, inputs: dict[str, Any], logps: Tensor, place: int | None, left_out: Tensor | None = None
    ) -> Tensor:
        """
        The ratio `[B, T]` or `[B, 1]`. With a `place` in the generation batch it counts in the metrics, but for
        sequences that were left out `[B]`, whose log-probs are not known.
        """
        values = logps, inputs["sampling_per_token_logps"], trl_compat.loss_mask(self.trainer, inputs)
        correction = sampling_correction(self.trainer)
        ratio = correction.ratio(*values)
        if place is not None:
            process = torch.full((len(logps),), self.trainer.accelerator.process_index, device=logps.device)
            self._metrics.add(place, correction, *values, ratio, inputs.get(GENERATED_BY, process), left_out)
        return ratio

    def _log(self) -> None:
        for name, value in self._metrics.gathered(self.trainer.accelerator).items():
            trl_compat.metrics_of(self.trainer)[name].append(value)
        self._metrics = SamplingMetrics(is_logged=True)

    def _unused_micro_batches(self) -> list[dict[str, Any]]:
        """The micro-batches of the last generation batch that the training has not come to yet."""
        trainer = self.trainer
        batches: list[dict[str, Any]] = trl_compat.buffered_micro_batches(trainer)
        steps = trl_compat.steps_per_generation(trainer)
        iteration, place = divmod(trl_compat.step_of(trainer) % (steps * trainer.num_iterations), steps)
        if iteration == place == 0:
            return []  # the next step generates
        return batches if iteration < trainer.num_iterations - 1 else batches[place:]

    @torch.no_grad()
    def _logps_of(self, inputs: dict[str, Any]) -> Tensor:
        """Log-probs `[B, T]` of a micro-batch, through the trainer's own method."""
        ids, mask = prompts_and_completions(inputs)
        method, length = self.trainer._get_per_token_logps_and_entropies, inputs["completion_ids"].size(1)
        images = {name: inputs[name] for name in MULTIMODAL_INPUTS if name in inputs}
        return method(self.trainer.model, ids, mask, length, **images)[0]
