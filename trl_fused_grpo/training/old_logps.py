"""
Old and reference log-probs that generation asks for and does not get.

Until the weights move, a forward for old log-probs computes those of the training forward once more. So it is left out,
and vLLM's importance ratio is computed from the log-probs that come later, with the formula of
`loss/importance_sampling.py`. Old log-probs of later micro-batches, and the reference's, are computed after generation,
in forwards with the same rows as the policy's: equal weights give equal bits.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import on_any_process, temporary_attr
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics
from trl_fused_grpo.modeling.head.output_projection import output_projection

from .engine import LogpsEngine
from .findings import Level, Reason
from .plan import Plan, why_old_logps_are_needed, why_reference_is_not_regrouped
from .requests import DEFERRED, LogpsArgs, LogpsRequest, LossCall, PerTokenLogps, images_of, prompts_and_completions


logger = logging.get_logger(__name__)

LEFT_IN_EVALUATION = Reason(
    Level.ROWS, "a generation has left the model in evaluation, until the training step behind it"
)
CHANGED_MODEL = Reason(Level.ROWS, "a reward function has changed the model")


class _LeftOut(NamedTuple):
    """
    A call of TRL's generation that is answered later: its arguments, the adapters that were on, TRL's method, and how
    often each weight was written.
    """

    call: LogpsArgs
    adapters: Any
    trl_method: Callable
    written: dict[Tensor, int]

    @property
    def is_late(self) -> bool:
        """Return `True` if the weights are others by now."""
        return any(weight._version != times for weight, times in self.written.items())


class DeferredLogps:
    """
    Decides which log-probs of a generation batch are left out, and computes afterwards those that the training forward
    does not give.
    """

    def __init__(
        self, trainer: GRPOTrainer, engine: LogpsEngine, build_request: Callable[[dict[str, Any]], LogpsRequest]
    ):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine, self.ladder, self.build_request = engine, engine.ladder, build_request
        self.is_generating = self._defers_old = self._defers_reference = False
        self._is_first = False  # generation of a training
        self._from_training = 0  # first micro-batches of a generation batch whose old log-probs the training gives
        self._policy_state: Any = None
        self._old: _LeftOut | None = None
        self._reference: _LeftOut | None = None
        self.leaves_evaluation = False

    @property
    def has_deferred_old_logps(self) -> bool:
        """Return `True` if the generation that runs did not get its old log-probs."""
        return self._defers_old and self._old is not None

    @contextmanager
    def generation(self, steps_left: int, is_first: bool) -> Generator[None, None, None]:
        """
        While it lasts, TRL generates and asks for log-probs; [`leaves_out`] says which of them it does not get. In the
        first generation of a training it gets all: they count where a reward function turns out to change the model.
        """
        if self.is_generating:  # a reward function generates too: nothing computes its log-probs afterwards
            with temporary_attr(self, "_defers_old", False), temporary_attr(self, "_defers_reference", False):
                yield
            return
        trainer, findings = self.trainer, self.ladder.findings
        packed = self.engine.packs(trainer.model, findings)
        may_skip_old = self.engine.options.fused_skip_old_logps is not False
        may_leave_out_old = may_skip_old or packed  # in TRL's padding micro-batches have one shape
        is_planned = trainer.model.training and steps_left > 0  # else nothing computes them afterwards
        if is_planned and trl_compat.step_of(trainer) % trl_compat.steps_per_generation(trainer) != 0:
            reason = "TRL generates in the middle of a generation batch, whose micro-batches were dropped"
            logger.warning_once(f"Old and reference log-probs are computed where TRL does, because {reason}.")
            is_planned = False
        with self.ladder.as_found():
            self._defers_old = is_planned and may_leave_out_old and why_old_logps_are_needed(trainer, findings) is None
            self._defers_reference = is_planned and why_reference_is_not_regrouped(trainer, findings, packed) is None
            self._policy_state = peft_compat.adapter_state(trainer.model)
            in_training = [module for module in torch_compat.modules_of(trainer.model) if module.training]
        self._from_training = steps_left if may_skip_old else 0
        self._old = self._reference = None
        self._is_first = is_first
        with temporary_attr(self, "is_generating", True):
            yield
        if any(left_out.is_late for left_out in self.left_out):
            self._stop_leaving_out()
        self.leaves_evaluation = not all(module.training for module in in_training)

    @property
    def left_out(self) -> list[_LeftOut]:
        """The calls of the last generation that are still to be answered."""
        return [call for call in (self._old, self._reference) if call is not None]

    def look_for_changes(self) -> None:
        """Leave no log-probs out any more where what runs behind them in a generation hooks or replaces something."""
        found = {reason for reason in self.ladder.findings.reasons if reason.level < Level.WINDOW}
        if self.left_out and found - {LEFT_IN_EVALUATION, CHANGED_MODEL, *self.ladder.elsewhere}:
            self._stop_leaving_out()

    def _stop_leaving_out(self) -> None:
        if not self._is_first:
            logger.warning_once(
                "Log-probs of this generation batch, which were to come from its training, are those of the model that "
                "a reward function has changed."
            )
        self.ladder.fall(CHANGED_MODEL)

    def keep_trl_logps(self) -> None:
        """After the first generation of a training: none of its log-probs is computed again."""
        self._old = self._reference = None

    def leaves_out(self, call: LogpsArgs, trl_method: Callable) -> bool:
        """
        Return `True` if a call of TRL's generation gets zeros. Log-probs that are computed later are those of the calls
        kept here, for [`compute_reference`] and [`old_logps`]; in the first generation TRL gets its own, too.
        """
        # A reward function may call the method too, and uses the result
        if not self.is_generating or not trl_compat.is_asked_by_generation():
            return False
        adapters = peft_compat.adapter_state(call.model)
        is_policy = call.model is not self.trainer.ref_model and adapters == self._policy_state
        if not (self._defers_old if is_policy else self._defers_reference):
            return False
        left_out = _LeftOut(call, adapters, trl_method, _times_written(call.model))
        if is_policy:
            self._old = left_out
        else:
            self._reference = left_out
        return not self._is_first

    def compute_reference(self, plan: Plan) -> None:
        """Compute the reference's log-probs where generation left them out, and put them into the micro-batches."""
        left_out, self._reference = self._reference, None
        if left_out is None:
            return
        head = output_projection(self.engine.causal_lm(self.trainer.model))
        head_grad = any(parameter.requires_grad for parameter in head.parameters())

        def build_as_policys(batch: dict[str, Any]) -> LogpsRequest:
            # With a forecast, of whose numbers nothing is asked: so the head takes the chunks of the training forward
            unknown = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
            with torch.enable_grad():
                return replace(self.build_request({**batch, "ref_per_token_logps": unknown}), head_grad=head_grad)

        groups = map(plan.sharing, plan.first_iteration)
        for batch, logps in self._computed(left_out, groups, build_as_policys):
            batch["ref_per_token_logps"] = logps

    def old_logps(self, plan: Plan) -> list[tuple[int, Tensor]]:
        """
        Compute the old log-probs that generation left out, of micro-batches that the training comes to with other
        weights, or of all where it is not to give any.

        Returns:
            `list[tuple[int, Tensor]]`: numbers of micro-batches in the generation batch, and log-probs `[B, T]`, nats.
        """
        left_out, self._old = self._old, None
        if left_out is None:
            return []
        from_training = self._from_training
        reason = self._why_adapters_differ(left_out)
        reason = reason or self.ladder.findings.why_below(Level.WINDOW)
        if reason is not None:
            logger.warning_once(f"Old log-probs have a forward of their own, because {reason}.")
            from_training = 0
        from_training += plan.forwards[0].places[0]
        later = [forward for forward in plan.first_iteration if forward.places.stop > from_training]
        numbers = [place % len(plan.micro_batches) for forward in later for place in forward.places]
        computed = self._computed(left_out, map(plan.sharing, later), self.build_request)
        return [(number, logps) for number, (_, logps) in zip(numbers, computed, strict=True)]

    def _why_adapters_differ(self, left_out: _LeftOut) -> str | None:
        """Why the training forward gives other log-probs, on any process: all compute as many forwards. Or `None`."""
        if left_out.adapters is None:
            return None
        are_others = left_out.adapters != peft_compat.adapter_state(left_out.call.model)
        is_on_any = on_any_process(self.trainer.accelerator, "adapters", are_others)
        return "other adapters are on than when TRL asked for them" if is_on_any else None

    @torch.no_grad()
    def _computed(
        self,
        left_out: _LeftOut,
        groups: Iterable[list[dict[str, Any]]],
        build_request: Callable[[dict[str, Any]], LogpsRequest],
    ) -> list[tuple[dict[str, Any], Tensor]]:
        """The micro-batches of the groups with log-probs `[B, T]` that generation left out."""
        call, results = replace(left_out.call, batch_size=None), []
        with peft_compat.adapters_as(call.model, left_out.adapters):
            for group in groups:
                # The positions that the policy's loss asks for
                logps_request = LogpsRequest.joined([build_request(batch) for batch in group])
                result = self.engine.compute(logps_request, call.with_batches(group), left_out.trl_method)
                sizes = [len(batch["completion_ids"]) for batch in group]
                results += zip(group, result.logps.split(sizes), strict=True)
        return results


def _times_written(model: Any) -> dict[Tensor, int]:
    """How often each weight was written, but through `.data`, which nobody counts."""
    return {weight: weight._version for weight in torch_compat.parameters_of(model)}


def sampling_correction(trainer: GRPOTrainer) -> SamplingCorrection:
    """The trainer's vLLM importance-sampling correction."""
    mode, bounds = trainer.vllm_importance_sampling_mode, trl_compat.sampling_clip_range(trainer)
    return SamplingCorrection(mode, *bounds, nan_ratio_is_one=trl_compat.NAN_RATIO_IS_ONE)


class OldLogps:
    """
    Gives micro-batches the old log-probs that generation left out. With vLLM's correction it computes their importance
    ratios, and logs the metrics that TRL logs of them.
    """

    name = "old_per_token_logps"  # of what a micro-batch gets

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self._metrics = SamplingMetrics()
        self._correction: SamplingCorrection | None = None

    @property
    def correction(self) -> SamplingCorrection:
        """The correction of the generation batch that is trained on, or of the trainer."""
        return self._correction or sampling_correction(self.trainer)

    def mark(self, output: dict[str, Any], correction: SamplingCorrection | None = None) -> None:
        """Mark a generation batch whose old log-probs and ratios the training will compute."""
        self._correction = correction
        del output[self.name]
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

    def fill(self, loss_call: LossCall, result: PerTokenLogps) -> None:
        """
        Give a marked micro-batch the log-probs of its own loss. What its loss cannot do without is put into what TRL
        reads, before TRL reads it. To `GRPOTrainer` it has no old log-probs yet: they are those of the training then.
        """
        micro_batch = loss_call.micro_batch
        if DEFERRED not in micro_batch:
            return
        number = trl_compat.step_of(self.trainer) % trl_compat.steps_per_generation(self.trainer)
        self.take(micro_batch, number, result.logps.detach(), result.left_out)
        needed = ("importance_sampling_ratio", "old_logps")
        loss_call.inputs |= {name: micro_batch[name] for name in needed if name in micro_batch}

    def take(self, micro_batch: dict[str, Any], number: int, logps: Tensor, left_out: Tensor | None = None) -> None:
        """
        Give a marked micro-batch its old log-probs, and what follows from them, as if TRL had made it so. By its
        `number` in the generation batch it counts in the metrics, but for sequences that were left out `[B]`, whose
        log-probs are not known.
        """
        if trainers.corrects_sampling(self.trainer):
            values = logps, micro_batch["sampling_per_token_logps"], trl_compat.loss_mask(self.trainer, micro_batch)
            ratio = self.correction.ratio(*values)
            micro_batch["importance_sampling_ratio"] = ratio
            self._metrics.add(number, *values, ratio, left_out)
        micro_batch[self.name] = self._of_batch(micro_batch, logps)
        del micro_batch[DEFERRED]
        if len(self._metrics.parts) == trl_compat.steps_per_generation(self.trainer):
            self._log_metrics()

    def _of_batch(self, micro_batch: dict[str, Any], logps: Tensor) -> Tensor:
        return logps

    def _log_metrics(self) -> None:
        metrics, self._metrics = self._metrics, SamplingMetrics()
        for name, value in metrics.gathered(self.trainer.accelerator, self.correction).items():
            trl_compat.metrics_of(self.trainer)[name].append(value)

    def resolve(self) -> None:
        """
        Compute what was left to a training that was interrupted. The weights must still be those that generated, as
        they are when the next training begins.
        """
        for number, batch in enumerate(trl_compat.buffered_micro_batches(self.trainer)):
            if DEFERRED in batch:  # none that was trained on
                self.take(batch, number, self._logps_of(batch))

    @torch.no_grad()
    def _logps_of(self, inputs: dict[str, Any]) -> Tensor:
        """Log-probs `[B, T]` of a micro-batch, through the trainer's own method."""
        ids, mask = prompts_and_completions(inputs)
        method, length = self.trainer._get_per_token_logps_and_entropies, inputs["completion_ids"].size(1)
        return method(self.trainer.model, ids, mask, length, **images_of(inputs))[0]


class RLOOOldLogps(OldLogps):
    """RLOO's old log-probs, one for each sequence. It corrects no sampling."""

    name = "old_logps"

    def _of_batch(self, micro_batch: dict[str, Any], logps: Tensor) -> Tensor:
        return (logps * micro_batch["completion_mask"]).sum(1)
