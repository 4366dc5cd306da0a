"""
What a fused trainer keeps between TRL's calls of its methods, and what it does in them.

`trainer.py` has the overrides; each calls a method here. Read on in the order of a training: `findings.py` (whose code
runs), `old_logps.py` (log-probs that generation leaves out), `plan.py` (which micro-batches share a forward),
`forward.py` (the forward that runs), `requests.py` (what the loss asks for) and `engine.py` (how log-probs are
computed).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.models import forget_repeated_hooks
from trl_fused_grpo._compat.peft import base_weights_kept
from trl_fused_grpo._compat.torch import modules_of
from trl_fused_grpo._utils import of_all_processes, on_any_process, temporary_attr
from trl_fused_grpo.modeling.attention.packed import uninstall_attention
from trl_fused_grpo.modeling.attention.padded import cudnn_attention_off
from trl_fused_grpo.modeling.head.output_projection import output_projection
from trl_fused_grpo.options import FusedOptions

from . import checks
from .engine import LogpsEngine
from .findings import Findings, Ladder, Level, Reason, log_no_effect, replaced_method
from .forward import AccumulationWindow, SharedForwards, reducing_gradients
from .memory import token_limits
from .old_logps import LEFT_IN_EVALUATION, DeferredLogps, OldLogps, RLOOOldLogps, sampling_correction
from .plan import Plan, last_that_fit, plan_forwards, why_forwards_are_not_shared
from .requests import (
    DEFERRED,
    LogpsArgs,
    LogpsRequest,
    LossCall,
    PerTokenLogps,
    build_loss_request,
    images_of,
    kl_term,
    padding_counts,
    replaces_kl,
)
from .summary import tell_summary


logger = logging.get_logger(__name__)


class FusedState:
    """The state of a [`FusedGRPOTrainer`], which the trainer's overrides call."""

    def __init__(self, trainer: GRPOTrainer, defaults: FusedOptions):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.ladder = Ladder(trainer)
        self.engine = LogpsEngine(trainer, defaults, self.ladder)
        self.forwards = SharedForwards(trainer, self.engine)
        self.deferred = DeferredLogps(trainer, self.engine, self.request_of)
        self.old_logps = RLOOOldLogps(trainer) if trainers.is_rloo(trainer) else OldLogps(trainer)
        self.check = checks.Check(trainer, self.engine, self.request_of)
        self.window = AccumulationWindow(trainer)
        self._loss: LossCall | None = None
        self._last_call: tuple[LogpsArgs, Callable] | None = None  # for the loss of a training step
        self._has_summary_to_tell = False
        self._has_asked_for_logps = False  # TRL, in any training step

    def attach(self, layer_kernels: bool) -> None:
        """Check options and models, and prepare the models, at the end of the trainer's constructor."""
        trainer, engine = self.trainer, self.engine
        engine.read_options()
        causal_lm = engine.causal_lm(trainer.model)
        checks.check_backward(trainer, engine.options.fused_backward)
        checks.check_aux_loss(trainer, causal_lm)
        checks.check_sharding(trainer, causal_lm)
        checks.check_kl_estimator(trainer, engine.options.kl_estimator)
        if layer_kernels and trainer.accelerator.device.type == "cpu":
            trl_compat.leave_layers(trainer.args)
        elif layer_kernels:
            trl_compat.apply_liger_layer_kernels(causal_lm, trainer.args)
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                checks.check_head(trainer, output_projection(engine.causal_lm(model)))
                engine.install(model)
        findings = self.look()
        checks.log_what_has_no_effect(trainer, engine.options, findings, engine.packs(trainer.model, findings))

    def attach_nothing(self) -> None:
        """With `use_liger_loss=False`: check the options, and say once that TRL trains alone."""
        self.engine.read_options()
        checks.check_kl_estimator(self.trainer, self.engine.options.kl_estimator)
        name = type(self.trainer).__name__
        logger.warning_once(f"{name} trains with TRL's own loss, because use_liger_loss=False.")

    def look(self, together: bool = False) -> Findings:
        """Gather the findings anew; `together` with the other processes, see [`Ladder.look`]."""
        more = [LEFT_IN_EVALUATION] if self.deferred.leaves_evaluation else []
        return self.ladder.look(self.engine, *more, is_in_train=self.window.is_in_train, together=together)

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
        self.old_logps.resolve()  # with the fused loss switched off meanwhile TRL would miss what was left out
        try:
            with temporary_attr(self.window, "is_in_train", True):
                yield
        finally:  # an exception leaves losses that wait: their graphs keep memory, and attention replaced
            self.window.begin()
            self.forwards.reset()
            self._last_call = self.ladder.walks = None

    def begin_accumulation(self, epoch: Any) -> None:
        """TRL takes the micro-batches of a new accumulation window from the iterator of an epoch."""
        self.window.begin(epoch)
        self.forwards.begin_window()

    # Generation, and the micro-batches that it is split into

    def generate(self, trl_generation: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What TRL generates and scores: some log-probs are left out of it."""
        if not self.window.begins:  # then the training step has looked
            self.look(together=True)
        model, is_nested = self.trainer.model, self.deferred.is_generating
        is_first = self._has_summary_to_tell and model.training
        if is_first:
            tell_summary(self.engine)  # by now the model is in its wrappers
            self._has_summary_to_tell = False
        keeps = self.engine.options.fused_keep_base_weights and checks.why_base_weights_stay(self.trainer) is None
        correction = sampling_correction(self.trainer) if trainers.corrects_sampling(self.trainer) else None
        with (
            self.deferred.generation(self.window.steps_left, is_first),
            base_weights_kept(model) if keeps else nullcontext(),
        ):
            output = trl_generation()
        forget_repeated_hooks(model)
        if is_first:
            self.look(together=True)
            self.deferred.look_for_changes()
            if self.ladder.level < Level.WINDOW:  # on any process, so on all
                self.deferred.keep_trl_logps()
        if self.deferred.has_deferred_old_logps and not is_nested:
            self.old_logps.mark(output, correction)
        return output

    def plan(self, batches: list[dict[str, Any]]) -> None:
        """Prepare the micro-batches of a new generation batch."""
        self.look(together=True)  # reward functions are the user's
        self.deferred.look_for_changes()
        with self.ladder.as_found():
            plan = self._plan_of(batches)
            self.forwards.follow(plan)
            self.deferred.compute_reference(plan)
            for number, logps in self.deferred.old_logps(plan):
                self.old_logps.take(batches[number], number, logps)

    def _plan_of(self, batches: list[dict[str, Any]]) -> Plan:
        trainer, engine, options, findings = self.trainer, self.engine, self.engine.options, self.ladder.findings
        causal_lm, count = engine.causal_lm(trainer.model), len(batches)
        has_images = images_on_any_process(trainer.accelerator, causal_lm, any(map(images_of, batches)))
        reason = why_forwards_are_not_shared(trainer, findings, engine.packs(trainer.model, findings))
        asked_for = "fused_max_tokens_per_forward" if options.fused_max_tokens_per_forward else None
        log_no_effect(asked_for, reason)
        ends = ends_of_first = list(range(count))
        if reason is None:
            padded = batches[0]["prompt_ids"].numel() + batches[0]["completion_ids"].numel()
            limits = token_limits(engine, has_images, padded)
            shares_prompts = engine.shares_prompts(trainer.model)
            of_first, of_others = last_that_fit(batches, limits, shares_prompts)
            # All must call the model at the same steps
            agreed = of_all_processes(trainer.accelerator, "shared forwards", [*of_first, *of_others]).amin(0)
            ends_of_first, ends = agreed.view(2, -1).tolist()
        steps = trl_compat.steps_of_generation_batch(trainer)
        places = range(trl_compat.step_of(trainer) % steps, steps)
        accumulation, window = trainer.args.gradient_accumulation_steps, self.window
        forwards = plan_forwards(ends, ends_of_first, places, window.steps_left, accumulation, window.begins)
        return Plan(tuple(batches), forwards)

    # A training step

    @contextmanager
    def training_step(self, model: nn.Module) -> Generator[None, None, None]:
        """While it lasts, TRL runs one training step. The backward may wait for other micro-batches."""
        accelerator, backward = self.trainer.accelerator, self.trainer.accelerator.backward

        @wraps(backward)  # so that `replaced_backward` sees whether the user replaced it
        def backward_of_forward(loss: Tensor, **options: Any) -> None:
            # Checkpointed layers compute their attention again, which must be as in forward
            is_off = any(stats.leaves_cudnn_off for stats in self.window.stats)
            with cudnn_attention_off() if is_off else nullcontext():
                run = partial(backward, **options)
                self.forwards.backward(loss, self.window.is_last, run)
            if not self.forwards.is_waiting:
                with temporary_attr(self.forwards, "steps_ahead", 1):
                    self._run_ahead(self.window.steps_left - 1)

        def train(mode: bool = True) -> nn.Module:
            # Trainer calls it on all modules in each step, with adapters for 8 ms in which the GPU waits. That is the
            # first call: later ones, of a generation, find the model's own
            del model.train
            return model if mode and self._is_in_training(model) else model.train(mode)

        if not self.forwards.is_waiting:  # else the step goes on with the forward of the one before
            self.window.stats = []
        with (
            temporary_attr(accelerator, "backward", backward_of_forward),
            temporary_attr(self.window, "is_in_step", True),
        ):
            if self.window.begins:
                self.look(together=True)
            elif self.ladder.level < Level.WINDOW or not self.window.is_in_train:
                self.look()  # whoever sees a micro-batch may hook or replace something
            is_own = self.ladder.level == Level.WINDOW and "train" not in vars(model)
            with temporary_attr(model, "train", train) if is_own else nullcontext():
                yield
        if not self._has_asked_for_logps:
            checks.log_that_nothing_is_fused(self.trainer)
        self.window.step_ends()
        if not self.forwards.is_waiting:
            self.window.count()
        if accelerator.sync_gradients:
            self.window.log_recomputed()
        if self.window.is_last:
            self.old_logps.resolve()  # where a callback ends the window early: TRL's weights have not moved yet

    def _is_in_training(self, model: nn.Module) -> bool:
        """Return `True` if `train()` would change nothing of a model."""
        if self.forwards.has_logps_of_step:  # since the step that ran this one's forward only libraries' code has run
            return True
        with self.ladder.as_found():
            return all(module.training for module in modules_of(model))

    # The loss of a micro-batch

    def compute_loss(self, micro_batch: dict[str, Any], trl_loss: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        """The loss of a micro-batch, a scalar."""
        trainer = self.trainer
        checks.check_micro_batch(micro_batch)
        loss_call = LossCall(micro_batch, dict(micro_batch))
        with temporary_attr(self, "_loss", loss_call):
            if not replaces_kl(trainer, self.engine.kl_estimator):
                return trl_loss(loss_call.inputs)
            # TRL's loss then has no KL term
            with temporary_attr(trainer, "_fused_beta", trainer.beta), temporary_attr(trainer, "beta", 0.0):
                loss = trl_loss(loss_call.inputs)
            assert loss_call.logps is not None, "TRL asked for log-probs"
            return loss + kl_term(trainer, loss_call.inputs, loss_call.logps, self.engine.kl_estimator)

    def per_token_logps(self, call: LogpsArgs, trl_method: Callable) -> tuple[Tensor | None, ...]:
        """What TRL's log-prob method returns."""
        trainer, self._has_asked_for_logps = self.trainer, self._has_asked_for_logps or self.window.is_in_step
        if self.deferred.leaves_out(call, trl_method):
            return trl_compat.logps_result(torch.zeros_like(call.completion_ids, dtype=torch.float32), None, None)
        if not self.window.is_in_step and not self.deferred.is_generating:
            self.look()  # a loop or a call of the user's own
        # An override of this method may ask for other rows than those of the loss
        is_overridden = replaced_method(trainer, ("_get_per_token_logps_and_entropies",)) is not None
        loss_call = None if is_overridden else self._loss
        if loss_call is not None and self.window.is_in_step and torch.is_grad_enabled():
            self.check.compare_logps(loss_call.inputs, call, trl_method)
        findings = self.ladder.of_call(self.engine, call.model)
        reason = findings.why_below(Level.HEAD)
        checks.check_trl_logps(trainer, self.engine.causal_lm(call.model), reason)
        if reason is not None:
            result = PerTokenLogps(*trl_compat.call_trl_logps(trl_method, **vars(call)))
        elif loss_call is not None:
            with self.ladder.as_found():
                result = self._logps_of_loss(loss_call, call, trl_method)
        else:
            result = self._logps_of_call(call, trl_method, findings)
        if loss_call is not None:
            loss_call.logps = result.logps
            self.old_logps.fill(loss_call, result)
        entropies = trl_compat.entropies_as_trl(trainer, result.entropies)
        return trl_compat.logps_result(result.logps, entropies, result.aux_loss)

    def _logps_of_call(self, call: LogpsArgs, trl_method: Callable, findings: Findings) -> PerTokenLogps:
        """Log-probs for a call that is not that of TRL's own loss."""
        reads_padding = trl_compat.COMPUTES_LOGPS_OF_PADDING and not self.engine.options.forces_rows
        if reads_padding and not (self.deferred.is_generating and trl_compat.is_asked_by_generation()):
            reason = Reason(Level.HEAD, "the caller of the log-prob method may read log-probs of padding")
            findings = Findings((*findings.reasons, reason))
        mask = call.attention_mask[:, -call.logits_to_keep :]  # [B, T]
        every_position = padding_counts(self.trainer) or (reads_padding and findings.level < Level.ROWS)
        logps_request = LogpsRequest(torch.ones_like(mask) if every_position else mask)
        result = self.engine.compute(logps_request, call, trl_method, findings)
        if torch.is_grad_enabled():
            self.window.keep_stats(result.stats)
        return result

    def _logps_of_loss(self, loss_call: LossCall, call: LogpsArgs, trl_method: Callable) -> PerTokenLogps:
        """Log-probs of the micro-batch whose loss TRL computes. Those that share its forward are computed with it."""
        micro_batch = loss_call.micro_batch
        if not torch.is_grad_enabled():
            return self.engine.compute(self.request_of(micro_batch), call, trl_method)
        result = self.forwards.take_logps(micro_batch)
        if result is None:
            result = self._run_forward(micro_batch, call, trl_method, self.window.steps_left)
        self.window.keep_stats(result.stats)
        self._last_call = call, trl_method
        return result

    def _run_ahead(self, steps_left: int) -> None:
        """
        Launch the window's next forward, if it has one, behind the backward that the device has begun: Trainer waits
        for the loss after each step, and the device would then wait until the forward is laid out.
        """
        micro_batch = self.forwards.planned_micro_batch()
        if micro_batch is None or steps_left < 1 or self._last_call is None or self.ladder.level < Level.WINDOW:
            return
        call, trl_method = self._last_call
        if images_of(micro_batch).keys() == call.multimodal.keys():
            with self.ladder.as_found():
                call = call.with_batches([micro_batch])
                self.forwards.keep_logps(self._run_forward(micro_batch, call, trl_method, steps_left))

    def _run_forward(
        self, micro_batch: dict[str, Any], call: LogpsArgs, trl_method: Callable, steps_left: int
    ) -> PerTokenLogps:
        """Run the forward that begins with a micro-batch, where `steps_left` are until the weights move."""
        shared, findings = self.forwards.sharing(micro_batch, steps_left), self.ladder.findings
        if len(shared) > 1:
            # Since the plan, the model may have refused packed rows, or the user may have replaced something
            packed = self.engine.packs(call.model, findings)
            if why_forwards_are_not_shared(self.trainer, findings, packed) is not None:
                shared = [micro_batch]

        def compute(sharing: list[dict[str, Any]]) -> PerTokenLogps:
            logps_request = LogpsRequest.joined([self.request_of(batch) for batch in sharing])
            joined = call if len(sharing) == 1 else call.with_batches(sharing)
            is_reduced_later = len(sharing) == steps_left and self.window.steps_left > 1
            with reducing_gradients(call.model) if is_reduced_later else nullcontext():
                return self.engine.compute(logps_request, joined, trl_method)

        return self.forwards.run(shared, compute)

    def request_of(self, inputs: dict[str, Any]) -> LogpsRequest:
        """Which positions of a micro-batch its loss asks for, and the gradients that it expects back."""
        skips = self.engine.options.fused_skip_zero_grad_sequences and not trl_compat.has_aux_loss(self.trainer)
        is_deferred = DEFERRED in inputs and trainers.corrects_sampling(self.trainer)
        correction = self.old_logps.correction if is_deferred else None
        return build_loss_request(self.trainer, inputs, skips, correction, self.engine.kl_estimator)


def images_on_any_process(accelerator: Any, causal_lm: Any, has_images: bool) -> bool:
    """Return `True` if any process has images."""
    if not architecture.may_take_images(causal_lm):
        return has_images
    return on_any_process(accelerator, "images", has_images)
