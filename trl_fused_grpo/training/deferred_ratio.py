"""
Old log-probs and vLLM's importance ratio, where generation leaves them to the training. Until the weights move, a
forward for old log-probs computes those of the training forward once more. So it is left out (`deferral.py`), and the
ratio is computed here from the log-probs that come later, with the formula of `loss/importance_sampling.py`.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics

from .logps_request import LossCall, PerTokenLogps, images_of, prompts_and_completions


# Marks micro-batches whose old log-probs, and what follows from them, generation left to the training
DEFERRED = "old_logps_from_training"


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
    Gives micro-batches the old log-probs that generation left out. With vLLM's correction it computes their importance
    ratios, and logs the metrics that TRL logs of them.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self._metrics = SamplingMetrics()
        self._correction: SamplingCorrection | None = None

    @property
    def correction(self) -> SamplingCorrection:
        """The correction of the generation batch that is trained on, or of the trainer."""
        return self._correction or sampling_correction(self.trainer)

    def mark(self, output: dict[str, Any], correction: SamplingCorrection | None = None) -> None:
        """
        Mark a generation batch whose old log-probs and ratios the training will compute.

        Args:
            output (`dict`): of TRL's generation.
            correction ([`SamplingCorrection`], *optional*): as it was before reward functions ran. TRL applies it then.
        """
        self._correction = correction
        del output["old_per_token_logps"]
        output[DEFERRED] = torch.tensor(True)
        if not trainers.corrects_sampling(self.trainer):
            return
        self._metrics = SamplingMetrics()
        logged = trl_compat.metrics_of(self.trainer)
        for name in SAMPLING_METRICS:  # TRL has just logged them, from log-probs that were not computed
            if logged.get(name):
                logged[name].pop()
            if not logged.get(name):
                logged.pop(name, None)
        del output["importance_sampling_ratio"]

    def fill(self, loss_call: LossCall, result: PerTokenLogps, counts: bool = True) -> None:
        """
        Put vLLM's ratio, if there is one, into what TRL reads of a marked micro-batch, before TRL reads it. To TRL it
        has no old log-probs yet, so that they are those of the training. From then on the micro-batch is one that TRL
        made, with old log-probs, for the case that the weights move before it is used again.

        Args:
            loss_call ([`LossCall`]): of TRL's `_compute_loss`.
            result ([`PerTokenLogps`]): of the training forward.
            counts (`bool`): whether the call is that of the training. Another leaves the micro-batch as it is.
        """
        inputs, micro_batch, logps = loss_call.inputs, loss_call.micro_batch, result.logps.detach()
        if DEFERRED not in inputs:
            return
        counts = counts and DEFERRED in micro_batch
        place = trl_compat.step_of(self.trainer) % trl_compat.steps_per_generation(self.trainer) if counts else None
        ratio = {}
        if trainers.corrects_sampling(self.trainer):
            ratio["importance_sampling_ratio"] = self._ratio(inputs, logps, place, result.left_out)
        inputs |= ratio
        if counts:
            micro_batch |= {**ratio, "old_per_token_logps": logps}
            del micro_batch[DEFERRED]
            self._log_when_complete()

    def take(self, micro_batch: dict[str, Any], place: int, logps: Tensor) -> None:
        """
        Give a marked micro-batch its old log-probs, and what follows from them.

        Args:
            micro_batch (`dict`): as TRL keeps it.
            place (`int`): its place in the generation batch.
            logps (`Tensor`): `[B, T]`, nats, computed with the weights that generated.
        """
        if trainers.corrects_sampling(self.trainer):
            micro_batch["importance_sampling_ratio"] = self._ratio(micro_batch, logps, place)
        micro_batch["old_per_token_logps"] = logps
        del micro_batch[DEFERRED]
        self._log_when_complete()

    def resolve(self) -> None:
        """
        Compute what was left to a training that was interrupted. The weights must still be those that generated, as
        they are when the next training begins.
        """
        batches = self._unused_micro_batches()
        first = trl_compat.steps_per_generation(self.trainer) - len(batches)
        for place, batch in enumerate(batches, first):
            if DEFERRED in batch:
                self.take(batch, place, self._logps_of(batch))

    def _ratio(
        self, inputs: dict[str, Any], logps: Tensor, place: int | None, left_out: Tensor | None = None
    ) -> Tensor:
        """
        The ratio `[B, T]` or `[B, 1]`. With a `place` in the generation batch it counts in the metrics, but for
        sequences that were left out `[B]`, whose log-probs are not known.
        """
        values = logps, inputs["sampling_per_token_logps"], trl_compat.loss_mask(self.trainer, inputs)
        ratio = self.correction.ratio(*values)
        if place is not None:
            self._metrics.add(place, self.correction, *values, ratio, left_out)
        return ratio

    def _log_when_complete(self) -> None:
        if len(self._metrics.sequences) < trl_compat.steps_per_generation(self.trainer):
            return
        for name, value in self._metrics.gathered(self.trainer.accelerator).items():
            trl_compat.metrics_of(self.trainer)[name].append(value)
        self._metrics = SamplingMetrics()

    def _unused_micro_batches(self) -> list[dict[str, Any]]:
        """
        The micro-batches of the last generation batch that the training has not come to yet. All, where its first step
        was interrupted: TRL generates anew then, but logs the metrics of the first generation too.
        """
        trainer = self.trainer
        batches: list[dict[str, Any]] = trl_compat.buffered_micro_batches(trainer)
        steps = trl_compat.steps_per_generation(trainer)
        iteration, place = divmod(trl_compat.step_of(trainer) % (steps * trainer.num_iterations), steps)
        return batches if iteration < trainer.num_iterations - 1 else batches[place:]

    @torch.no_grad()
    def _logps_of(self, inputs: dict[str, Any]) -> Tensor:
        """Log-probs `[B, T]` of a micro-batch, through the trainer's own method."""
        ids, mask = prompts_and_completions(inputs)
        method, length = self.trainer._get_per_token_logps_and_entropies, inputs["completion_ids"].size(1)
        return method(self.trainer.model, ids, mask, length, **images_of(inputs))[0]
