"""
Log-probs that generation asks for and does not get. Until the weights move, the old ones come from the training
forward, see `deferred_ratio.py`. Those of later micro-batches, and the reference's, are computed after generation, in
forwards with the same rows as the policy's, so that equal weights give equal bits.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.head.output_projection import output_projection

from .agreement import on_any_process
from .checks import check_on_policy
from .engine import LogpsEngine
from .findings import Level, Reason
from .logps_request import LogpsArgs, LogpsRequest
from .plan import why_generation_is_out_of_turn, why_old_logps_are_needed, why_reference_is_not_regrouped


logger = logging.get_logger(__name__)


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


class LogpsDeferral:
    """
    Decides which log-probs of a generation batch are left out, and computes afterwards those that the training forward
    does not give.

    Args:
        trainer (`GRPOTrainer`): whose log-probs they are.
        engine ([`LogpsEngine`]): computes them.

    Attributes:
        is_generating (`bool`): whether TRL generates.
        leaves_evaluation (`bool`): whether the last generation has left a module in evaluation that was in training.
    """

    def __init__(self, trainer: GRPOTrainer, engine: LogpsEngine):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self.is_generating = self._defers_old = self._defers_reference = False
        self._from_training = 0  # first micro-batches of a generation batch whose old log-probs the training gives
        self._policy_state: Any = None
        self._old: _LeftOut | None = None
        self._reference: _LeftOut | None = None
        self.leaves_evaluation = False

    @property
    def has_left_out_old(self) -> bool:
        """Return `True` if the generation that runs, or that is not planned yet, did not get its old log-probs."""
        return self._old is not None

    @contextmanager
    def generation(self, steps_left: int) -> Generator[None, None, None]:
        """
        While it lasts, TRL generates and asks for log-probs; [`leaves_out`] says which of them it does not get.

        Args:
            steps_left (`int`): micro-batches until the weights move; zero outside a training step.
        """
        trainer = self.trainer
        if trainer.model.training:
            check_on_policy(trainer, steps_left)
        is_training, may_skip_old = trainer.model.training, self.engine.options.fused_skip_old_logps is not False
        packed = self.engine.packs(trainer.model)
        before, is_nested = dict(vars(self)), self.is_generating  # a reward function may generate too
        self.is_generating = True
        # Outside a training step, and for a reward function, nothing computes them afterwards
        is_planned = is_training and steps_left > 0 and not is_nested
        may_leave_out_old = may_skip_old or packed  # in TRL's padding micro-batches have one shape
        if is_planned and (reason := why_generation_is_out_of_turn(trainer)) is not None:
            logger.warning_once(f"Old log-probs are computed where TRL does, because {reason}.")
            may_leave_out_old = False
        self._defers_old = is_planned and may_leave_out_old and why_old_logps_are_needed(trainer) is None
        self._defers_reference = is_planned and why_reference_is_not_regrouped(trainer, packed) is None
        self._policy_state = peft_compat.adapter_state(trainer.model)
        self._from_training = steps_left if may_skip_old else 0
        self._old = self._reference = None
        in_training = [module for module in torch_compat.modules_of(trainer.model) if module.training]
        try:
            yield
            self._look_for_moved_weights()
            self.leaves_evaluation = not all(module.training for module in in_training)
        finally:
            if is_nested:
                vars(self).update(before)
            else:
                self.is_generating = self._defers_old = self._defers_reference = False

    def _look_for_moved_weights(self) -> None:
        """Leave no log-probs out any more where something that runs after them in a generation has moved weights."""
        if any(left_out is not None and left_out.is_late for left_out in (self._old, self._reference)):
            reason = (
                "a reward function has moved weights: log-probs of this generation batch, which were to come from its "
                "training, are those of the new weights"
            )
            self.trainer._fused.ladder.fall(Reason(Level.ROWS, reason))

    def leaves_out(self, call: LogpsArgs, trl_method: Callable) -> bool:
        """
        Return `True` if a call of TRL's generation gets zeros, because its log-probs are computed later. It is kept for
        [`compute_reference`] and [`old_logps`].

        Args:
            call ([`LogpsArgs`]): the call.
            trl_method (`Callable`): TRL's own method for it.
        """
        # A reward function may call the method too, and uses the result
        if not self.is_generating or not trl_compat.is_asked_by_generation():
            return False
        trainer = self.trainer
        left_out = _LeftOut(call, peft_compat.adapter_state(call.model), trl_method, _times_written(call.model))
        if call.model is not trainer.ref_model and left_out.adapters == self._policy_state:
            leaves_out = self._defers_old
            self._old = left_out if leaves_out else None
        else:
            leaves_out = self._defers_reference
            self._reference = left_out if leaves_out else None
        return leaves_out

    def compute_reference(
        self, groups: list[list[dict[str, Any]]], build_request: Callable[[dict[str, Any]], LogpsRequest]
    ) -> None:
        """
        Compute the reference's log-probs where generation left them out, and put them into the micro-batches.

        Args:
            groups (`list[list[dict]]`): the micro-batches of the generation batch as they will share forwards.
            build_request (`Callable`): the request of a micro-batch's loss.
        """
        left_out, self._reference = self._reference, None
        if left_out is None:
            return
        head = output_projection(self.engine.causal_lm(self.trainer.model))
        head_grad = any(parameter.requires_grad for parameter in head.parameters())

        def build_as_policys(batch: dict[str, Any]) -> LogpsRequest:
            # With a forecast, of whose numbers nothing is asked: so the head takes the chunks of the training forward
            unknown = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
            with torch.enable_grad():
                return replace(build_request({**batch, "ref_per_token_logps": unknown}), head_grad=head_grad)

        for batch, logps in self._computed(left_out, groups, build_as_policys):
            batch["ref_per_token_logps"] = logps

    def old_logps(
        self, groups: list[list[dict[str, Any]]], build_request: Callable[[dict[str, Any]], LogpsRequest]
    ) -> list[tuple[int, Tensor]]:
        """
        Compute the old log-probs that generation left out, of micro-batches that the training comes to with other
        weights, or of all where it is not to give any.

        Args:
            groups, build_request: see [`compute_reference`].

        Returns:
            `list[tuple[int, Tensor]]`: places of micro-batches in the generation batch, and log-probs `[B, T]`, nats.
        """
        left_out, self._old = self._old, None
        if left_out is None:
            return []
        before, later = 0, []
        from_training = self._from_training
        reason = self._why_adapters_are_others(left_out)
        reason = reason or self.trainer._fused.ladder.findings.why_below(Level.WINDOW)
        if reason is not None:
            logger.warning_once(f"Old log-probs have a forward of their own, because {reason}.")
            from_training = 0
        for group in groups:  # each within one accumulation window
            before += len(group)
            later += [group] if before > from_training else []
        logps = [logps for _, logps in self._computed(left_out, later, build_request)]
        return list(enumerate(logps, before - len(logps)))

    def _why_adapters_are_others(self, left_out: _LeftOut) -> str | None:
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
        groups: list[list[dict[str, Any]]],
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
