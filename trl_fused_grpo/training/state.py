"""
What a fused trainer keeps between TRL's calls of its methods, and what it does in them.

`trainer.py` has the overrides; each calls a method here. Read on in the order of a training: `deferral.py`
(log-probs that generation leaves out), `merging.py` (micro-batches that share a forward), `loss_request.py` (what the
loss asks for) and `engine.py` (how log-probs are computed).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.repeated_hooks import forget_repeated_hooks
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.modeling.attention.packed import cudnn_attention_off, uninstall_attention
from trl_fused_grpo.modeling.head.output_projection import output_projection

from . import checks
from .check import Check
from .deferral import LogpsDeferral
from .deferred_ratio import DeferredRatio, sampling_correction
from .engine import LogpsEngine
from .findings import Findings, Ladder, Level, Reason
from .kl import kl_term, replaces_kl
from .logps_request import LogpsArgs, LogpsRequest, LossCall, PerTokenLogps
from .loss_request import build_call_request, build_loss_request, padding_counts
from .merging import MicroBatchMerger, reducing_gradients
from .overrides import replaced_behind, replaced_method
from .plan import why_forwards_are_not_shared
from .rloo import DeferredOldLogps
from .summary import tell_summary
from .window import AccumulationWindow


logger = logging.get_logger(__name__)


class FusedState:
    """
    The state of a [`FusedGRPOTrainer`], which the trainer's overrides call.

    Args:
        trainer (`GRPOTrainer`): not yet constructed.
        defaults ([`FusedOptions`]): the options that its arguments do not have.

    Attributes:
        engine ([`LogpsEngine`]): computes log-probs.
        merger ([`MicroBatchMerger`]): micro-batches that share a forward.
        deferral ([`LogpsDeferral`]): log-probs that generation leaves out.
        ratio ([`DeferredRatio`]): what follows from old log-probs that generation leaves out.
        ladder ([`Ladder`]): what was found of code that is not the libraries', and the level that follows.
        check ([`Check`]): compares micro-batches with TRL's own path.
        window ([`AccumulationWindow`]): the training steps between two optimizer steps.
        micro_batch (`dict`): the inputs of the training step that runs.
        is_in_train (`bool`): whether TRL's `train` runs.
    """

    def __init__(self, trainer: GRPOTrainer, defaults: FusedOptions):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = LogpsEngine(trainer, defaults)
        self.merger, self.deferral = MicroBatchMerger(trainer, self.engine), LogpsDeferral(trainer, self.engine)
        self.ratio = DeferredOldLogps(trainer) if trainers.is_rloo(trainer) else DeferredRatio(trainer)
        self.ladder = Ladder(trainer)
        self.check, self.window = Check(trainer, self.engine), AccumulationWindow(trainer)
        self.micro_batch: dict[str, Any] = {}
        self._loss: LossCall | None = None
        self.is_in_train = self._has_summary_to_tell = False
        self._is_asked = False  # for log-probs, in a training step

    def attach(self, layer_kernels: bool) -> None:
        """
        Check options and models, and prepare the models, at the end of the trainer's constructor.

        Args:
            layer_kernels (`bool`): whether `use_liger_kernel` asks for Liger's layers.

        Raises:
            `ValueError`: when model or options cannot be fused; the message says what to change.
        """
        trainer, engine = self.trainer, self.engine
        engine.read_options()
        causal_lm = engine.causal_lm(trainer.model)
        checks.check_backward(trainer, engine.options.fused_backward)
        checks.check_aux_loss(trainer, causal_lm)
        checks.check_sharding(trainer, causal_lm)
        checks.check_options(trainer)
        if layer_kernels and trainer.accelerator.device.type == "cpu":
            trl_compat.leave_layers(trainer.args)
        elif layer_kernels:
            trl_compat.apply_liger_layer_kernels(causal_lm, trainer.args)
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                checks.check_head(trainer, output_projection(engine.causal_lm(model)))
                engine.read_head_options(model)
                engine.install(model)
        self.ladder.look()
        checks.log_what_has_no_effect(trainer)

    def attach_nothing(self) -> None:
        """With `use_liger_loss=False`: check the options, and say once that TRL trains alone."""
        self.engine.read_options()
        checks.check_options(self.trainer)
        name = type(self.trainer).__name__
        logger.warning_once(f"{name} trains with TRL's own loss, because use_liger_loss=False.")

    def detach(self) -> None:
        """Undo what was done to models and to transformers' attention. Idempotent."""
        self.engine.uninstall()
        uninstall_attention()

    @contextmanager
    def training(self) -> Generator[None, None, None]:
        """While it lasts, TRL trains: options are read anew, and what an interrupted training has left is ended."""
        if self.trainer.use_liger_loss:
            self.engine.read_options()
            self.check.reset()
            self._has_summary_to_tell = True
        self.ratio.resolve()  # with the fused loss switched off meanwhile TRL would miss what was left out
        with temporary_attr(self, "is_in_train", True), self.merger.training():
            self.window.begin()
            try:
                yield
            finally:  # a loop of the user's own may come next, after an exception too
                self.window.begin()

    def begin_accumulation(self, epoch: Any) -> None:
        """TRL takes the micro-batches of a new accumulation window from the iterator of an epoch."""
        self.window.begin(epoch)
        self.merger.begin_window()

    # Generation, and the micro-batches that it is split into

    @contextmanager
    def generation(self) -> Generator[Any, None, None]:
        """While it lasts, TRL generates: some log-probs are left out. Yields vLLM's correction, `None` without it."""
        if not self.window.begins:  # then the training step has looked
            self.ladder.look(together=True)
        if self._has_summary_to_tell and self.trainer.model.training:
            tell_summary(self.engine)  # by now the model is in its wrappers
            self._has_summary_to_tell = False
        with self.deferral.generation(self.window.steps_left):
            yield sampling_correction(self.trainer) if trainers.corrects_sampling(self.trainer) else None
        forget_repeated_hooks(self.trainer.model)

    def plan(self, batches: list[dict[str, Any]]) -> None:
        """Prepare the micro-batches of a new generation batch."""
        self.ladder.look(together=True)  # reward functions are the user's
        self.merger.plan_generation(batches)
        groups = self.merger.groups(self.window.steps_left, self.window.begins)
        self.deferral.compute_reference(groups, self.request_of)
        for place, logps in self.deferral.old_logps(groups, self.request_of):
            self.ratio.take(batches[place], place, logps)

    # A training step

    @contextmanager
    def training_step(self) -> Generator[None, None, None]:
        """While it lasts, TRL runs one training step. The backward may wait for other micro-batches."""
        accelerator, backward = self.trainer.accelerator, self.trainer.accelerator.backward

        @wraps(backward)  # so that `replaced_backward` sees whether the user replaced it
        def backward_of_forward(loss: Tensor, **options: Any) -> None:
            # Checkpointed layers compute their attention again, which must be as in forward
            is_off = any(stats.leaves_cudnn_off for stats in self.window.stats)
            with cudnn_attention_off() if is_off else nullcontext():
                run = partial(backward, **options)
                self.merger.backward(loss, self.micro_batch, self.window.is_last, run)

        self.window.step_begins(goes_on=self.merger.is_waiting)
        with (
            temporary_attr(accelerator, "backward", backward_of_forward),
            temporary_attr(self.window, "is_in_step", True),
        ):
            if self.window.begins:
                self.ladder.look(together=True)
            elif self.ladder.level < Level.WINDOW:  # whoever sees a micro-batch may hook or replace something
                self.ladder.look()
            yield
        if not self._is_asked:
            checks.log_that_nothing_is_fused(self.trainer)
        self.window.step_ends()
        if not self.merger.is_waiting:
            self.check.after_backward(self._loss_of)
            self.window.count()
        if accelerator.sync_gradients:
            self.window.log_recomputed()
        if self.window.is_last:
            self.ratio.resolve()  # where a callback ends the window early: TRL's weights have not moved yet

    # The loss of a micro-batch

    def is_objective_replaced(self) -> bool:
        """Whether TRL's objective is not TRL's own any more."""
        replaced = replaced_behind(self.trainer, "_compute_loss")
        return bool(replaced or replaced_method(self.trainer, trl_compat.OBJECTIVE_METHODS))

    def compute_loss(self, micro_batch: dict[str, Any], trl_loss: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        """
        The loss of a micro-batch, a scalar.

        Args:
            micro_batch (`dict`): what TRL calls its `_compute_loss` with.
            trl_loss (`Callable`): TRL's own `_compute_loss` for given inputs.
        """
        checks.check_micro_batch(micro_batch)
        before = self.check.snapshot(micro_batch)
        loss = self._loss_of(micro_batch, trl_loss)
        if self.window.is_in_step:
            self.check.keep(before, trl_loss)
        return loss

    def _loss_of(self, micro_batch: dict[str, Any], trl_loss: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        loss_call = LossCall(micro_batch, dict(micro_batch), trainers.beta_of_loss(self.trainer))
        with temporary_attr(self, "_loss", loss_call):
            if not replaces_kl(self.trainer):
                return trl_loss(loss_call.inputs)
            with temporary_attr(self.trainer, "beta", 0.0):  # TRL's loss then has no KL term
                loss = trl_loss(loss_call.inputs)
            assert loss_call.logps is not None, "TRL asked for log-probs"
            return loss + kl_term(self.trainer, loss_call.inputs, loss_call.logps)

    def per_token_logps(self, call: LogpsArgs, trl_method: Callable) -> tuple[Tensor | None, ...]:
        """
        What TRL's log-prob method returns.

        Args:
            call ([`LogpsArgs`]): its arguments.
            trl_method (`Callable`): TRL's own method.
        """
        trainer, self._is_asked = self.trainer, self._is_asked or self.window.is_in_step
        if self.deferral.leaves_out(call, trl_method):
            return trl_compat.logps_result(torch.zeros_like(call.completion_ids, dtype=torch.float32), None, None)
        if not self.window.is_in_step and not self.deferral.is_generating:
            self.ladder.look()  # a loop or a call of the user's own
        # An override of this method may ask for other rows than those of the loss
        is_overridden = replaced_method(trainer, ("_get_per_token_logps_and_entropies",)) is not None
        loss_call = None if is_overridden else self._loss
        if loss_call is not None and self.window.is_in_step and torch.is_grad_enabled():
            self.check.compare_logps(loss_call.inputs, call, trl_method)
        findings = self.ladder.of_call(call.model)
        reason = findings.why_below(Level.HEAD)
        checks.check_trl_logps(trainer, self.engine.causal_lm(call.model), reason)
        if reason is not None or self.check.asks_trl:
            result = PerTokenLogps(*trl_compat.call_trl_logps(trl_method, **vars(call)))
        elif loss_call is not None:
            result = self._logps_of_loss(loss_call, call, trl_method)
        else:
            result = self._logps_of_call(call, trl_method, findings)
        if loss_call is not None:
            loss_call.logps = result.logps
            self.ratio.fill(loss_call, result, counts=not self.check.is_running)
        entropies = trl_compat.entropies_as_trl(trainer, result.entropies)
        return trl_compat.logps_result(result.logps, entropies, result.aux_loss)

    def _logps_of_call(self, call: LogpsArgs, trl_method: Callable, findings: Findings) -> PerTokenLogps:
        """Log-probs for a call that is not that of TRL's own loss."""
        reads_padding = trl_compat.COMPUTES_LOGPS_OF_PADDING and not self.engine.options.forces_rows
        if reads_padding and not (self.deferral.is_generating and trl_compat.is_asked_by_generation()):
            reason = Reason(Level.HEAD, "the caller of the log-prob method may read log-probs of padding")
            findings = Findings((*findings.reasons, reason))
        beta = None if self._loss is None else self._loss.beta
        logps_request = build_call_request(self.trainer, call, reads_padding and findings.level < Level.ROWS, beta)
        result = self.engine.compute(logps_request, call, trl_method, findings)
        if torch.is_grad_enabled() and not self.check.is_running:
            self.window.keep_stats(result.stats)
        return result

    def _logps_of_loss(self, loss_call: LossCall, call: LogpsArgs, trl_method: Callable) -> PerTokenLogps:
        """Log-probs of the micro-batch whose loss TRL computes. Those that share its forward are computed with it."""
        micro_batch = loss_call.micro_batch
        if self.check.is_running or not torch.is_grad_enabled():
            return self.engine.compute(self.request_of(micro_batch), call, trl_method)
        if (kept := self.merger.take_logps(micro_batch)) is not None:
            return kept
        sharing = self._sharing_forward(loss_call, call.model)
        requests = {id(batch): self.request_of(batch) for batch in sharing}

        def compute(group: list[dict[str, Any]]) -> PerTokenLogps:
            logps_request = LogpsRequest.joined([requests[id(batch)] for batch in group])
            is_alone = len(group) == 1 and group[0] is micro_batch
            joined = call if is_alone else call.with_batches(group)
            with reducing_gradients(call.model) if 1 < len(group) == self.window.steps_left else nullcontext():
                return self.engine.compute(logps_request, joined, trl_method)

        group, of_group = self.merger.fitting(sharing, compute)
        results = of_group.split([len(batch["completion_ids"]) for batch in group]) if len(group) > 1 else [of_group]
        self.merger.keep(micro_batch, results)
        self.window.keep_stats(results[0].stats)
        return results[0]

    def _sharing_forward(self, loss_call: LossCall, model: nn.Module) -> list[dict[str, Any]]:
        """The micro-batches that share the forward of this one, itself first."""
        finds_no_gradients = self.window.begins and self.merger.find_no_gradients(loss_call.micro_batch)
        steps_left = 1 if self.window.is_stopped else self.window.steps_left
        group = self.merger.group_of(loss_call.micro_batch, steps_left, finds_no_gradients)
        if len(group) == 1:
            return group
        packed = self.engine.packs(model, padding_counts(self.trainer, loss_call.beta))
        # Since the plan, the model may have refused packed rows, or the user may have replaced something
        return group if why_forwards_are_not_shared(self.trainer, packed) is None else [loss_call.micro_batch]

    def request_of(self, inputs: dict[str, Any]) -> LogpsRequest:
        """Which positions of a micro-batch its loss asks for, and the gradients that it expects back."""
        skips = self.engine.options.fused_skip_zero_grad_sequences and not trl_compat.has_aux_loss(self.trainer)
        return build_loss_request(self.trainer, inputs, skips, None if self._loss is None else self._loss.beta)
