"""
Log-probs that generation asks for and does not get. The old ones come from the training forward, see
`deferred_ratio.py`. The reference's are computed after generation, in forwards with the same rows as the policy's, so
that equal weights give equal bits.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trl as trl_compat

from .checks import check_on_policy
from .eligibility import why_generation_is_seen, why_not_fused, why_old_logps_are_needed, why_reference_is_not_regrouped
from .engine import LogpsEngine
from .logps_request import LogpsArgs, LogpsRequest


logger = logging.get_logger(__name__)


class LogpsDeferral:
    """
    Decides which log-probs of a generation batch are left out, and computes the reference's afterwards.

    Args:
        trainer (`GRPOTrainer`): whose log-probs they are.
        engine ([`LogpsEngine`]): computes them.

    Attributes:
        is_generating (`bool`): whether TRL generates.
        defers_old (`bool`): whether the old log-probs of the generation that runs are left to the training.
    """

    def __init__(self, trainer: GRPOTrainer, engine: LogpsEngine):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self.is_generating = self.defers_old = self._defers_reference = False
        self._policy_state: Any = None
        self._reference: tuple[LogpsArgs, Any, Callable] | None = None

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
        layout = self.engine.layout(trainer.model)
        reason = why_generation_is_seen(trainer)
        if is_training and reason is not None and (trainer.use_vllm or trainer.beta != 0.0):
            logger.warning_once(f"Old and reference log-probs are computed where TRL does, because {reason}.")
        self.is_generating = True
        self.defers_old = is_training and may_skip_old and why_old_logps_are_needed(trainer, steps_left) is None
        is_planned = is_training and steps_left > 0  # outside a training step nothing computes it afterwards
        self._defers_reference = is_planned and why_reference_is_not_regrouped(trainer, layout) is None
        self._policy_state = model_compat.adapter_state(trainer.model)
        self._reference = None
        try:
            yield
        finally:
            self.is_generating = self.defers_old = self._defers_reference = False

    def leaves_out(self, call: LogpsArgs, trl_method: Callable) -> bool:
        """
        Whether a call of TRL's generation gets zeros, because its log-probs are computed later. A call for the
        reference's is kept for [`compute_reference`].

        Args:
            call ([`LogpsArgs`]): the call.
            trl_method (`Callable`): TRL's own method for it.
        """
        # A reward function may call the method too, and uses the result
        if not self.is_generating or not trl_compat.is_asked_by_generation():
            return False
        trainer = self.trainer
        state = model_compat.adapter_state(call.model)
        if call.model is not trainer.ref_model and state == self._policy_state:
            return self.defers_old
        is_fused = why_not_fused(trainer, call.model, self.engine.causal_lm(call.model)) is None
        if self._defers_reference and is_fused:
            self._reference = call, state, trl_method
            return True
        return False

    def compute_reference(
        self, groups: list[list[dict[str, Any]]], build_request: Callable[[dict[str, Any]], LogpsRequest]
    ) -> None:
        """
        Compute the reference's log-probs where generation left them out, and put them into the micro-batches.

        Args:
            groups (`list[list[dict]]`): the micro-batches of the generation batch as they will share forwards.
            build_request (`Callable`): the request of a micro-batch's loss.
        """
        if self._reference is None:
            return
        (call, state, trl_method), self._reference = self._reference, None
        call = replace(call, batch_size=None)
        with model_compat.adapters_as(call.model, state):
            for group in groups:
                # The policy's request, so that rows stand in the same order
                logps_request = LogpsRequest.joined([build_request(batch) for batch in group])
                with torch.no_grad():
                    result = self.engine.compute(logps_request, call.with_batches(group), trl_method)
                sizes = [len(batch["completion_ids"]) for batch in group]
                for batch, logps in zip(group, result.logps.split(sizes), strict=True):
                    batch["ref_per_token_logps"] = logps
