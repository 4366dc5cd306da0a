"""`FusedGRPOTrainer`: TRL's `GRPOTrainer` with its log-probabilities taken from the fused linear function."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo.modeling.fused_forward import install_fused_forward
from trl_fused_grpo.modeling.output_projection import output_projection
from trl_fused_grpo.modeling.packed_attention import cudnn_attention_off
from trl_fused_grpo.ops.linear_logps import FusedStats
from trl_fused_grpo.training.checks import (
    check_aux_loss,
    check_backward,
    check_head,
    check_kl_estimator,
    check_micro_batch,
    check_sharding,
    tell_what_has_no_effect,
)
from trl_fused_grpo.training.customisation import replaced_behind, replaced_method
from trl_fused_grpo.training.deferral import LogpsDeferral
from trl_fused_grpo.training.eligibility import why_forwards_are_not_shared, why_not_fused, why_padding_may_be_read
from trl_fused_grpo.training.engine import LogpsEngine
from trl_fused_grpo.training.kl import kl_left_out, kl_term, replaces_kl
from trl_fused_grpo.training.logps import LogpsArgs, LogpsRequest, PerTokenLogps
from trl_fused_grpo.training.loss_request import build_call_request, build_loss_request
from trl_fused_grpo.training.merging import MicroBatchMerger, reducing_gradients

from ._compat import trl as trl_compat
from ._utils import temporary_attr


logger = logging.get_logger(__name__)


class FusedGRPOTrainer(GRPOTrainer):
    """
    Drop-in for [`~trl.GRPOTrainer`]: the same constructor, objective and metrics, without `[batch, length, vocab]`
    logits.

    With `use_liger_loss=True` in its arguments, every log-probability (policy, old policy, reference) comes from the
    fused linear function; TRL's own `_compute_loss` turns them into the loss. With `use_liger_loss=False` it is the
    stock trainer. `use_liger_kernel=True` means the fused loss and Liger's layer kernels.

    Micro-batches of an accumulation window may share a forward of the model (`fused_max_tokens_per_forward`). Each has
    its loss in its own training step; the gradients of all come with the last of them.

    What you override, hook or replace is heeded: a faster path that assumes TRL's own is left then, and the reason is
    logged once (`docs/faster-paths.md`).

    Beside TRL's metrics it logs `fused/rows_recomputed`, the fraction of rows whose gradient was not as forecast.

    Raises:
        `ValueError`: in the constructor, when model or options cannot be fused; the message says what to change.
    """

    args: GRPOConfig
    model: nn.Module
    _tag_names: ClassVar[list[str]] = [*getattr(GRPOTrainer, "_tag_names", []), "fused-grpo"]  # ty: ignore[incompatible-attribute-override]

    def __init__(self, *args: Any, **kwargs: Any):
        # A class of the user's that stands between may take further arguments
        given = {**dict(zip([*inspect.signature(GRPOTrainer.__init__).parameters][1:], args, strict=False)), **kwargs}
        config: Any = given.get("args")
        model = given.get("model")
        layer_kernels = getattr(config, "use_liger_kernel", False)
        self.use_liger_loss = bool(getattr(config, "use_liger_loss", False) or layer_kernels)
        self._stats: list[FusedStats] = []
        self._engine = LogpsEngine(self)
        self._merger = MicroBatchMerger(self, self._engine)
        self._deferral = LogpsDeferral(self, self._engine)
        # The micro-batch whose loss TRL's own `_compute_loss` computes, and what of it TRL reads
        self._loss_inputs: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._loss_logps: Tensor | None = None  # its log-probs
        self._current_micro_batch: dict[str, Any] = {}
        self._window_step = 0
        self._is_in_step = False
        if not self.use_liger_loss:
            super().__init__(*args, **kwargs)
            check_kl_estimator(self)
            return
        if isinstance(model, PreTrainedModel):
            output_projection(model)  # before the host fails on it with less to say
        with trl_compat.liger_flag_lowered(config), trl_compat.adapter_on_head_allowed():
            super().__init__(*args, **kwargs)
        check_backward(self, self._engine.option("fused_backward", "auto"))
        check_aux_loss(self, self._engine.causal_lm(self.model))
        check_sharding(self, self._engine.causal_lm(self.model))
        check_kl_estimator(self)
        if layer_kernels and self.accelerator.device.type == "cpu":
            trl_compat.leave_layers(config)
        elif layer_kernels:
            trl_compat.apply_liger_layer_kernels(self._engine.causal_lm(self.model), config)
        policies: tuple[Any, ...] = (self.model, self.ref_model)
        for policy in policies:
            if policy is not None:
                check_head(self, output_projection(self._engine.causal_lm(policy)))
                install_fused_forward(self._engine.causal_lm(policy))
        tell_what_has_no_effect(self, lambda: self._engine.layout(self.model))

    @property
    def fused_stats(self) -> FusedStats:
        """What the fused function did in the last loss forward; its backward fills in `recomputed`."""
        return self._stats[-1] if self._stats else FusedStats()

    @property
    def is_rebalanced(self) -> bool:
        """Whether the sequences of the last generation batch were partitioned anew (`fused_balance`)."""
        return self._merger.rebalanced

    def fused_layout(self, is_multimodal: bool = False) -> str:
        """
        The layout that the policy's rows get: `"packed"`, `"aligned"` or `"padded"`.

        Args:
            is_multimodal (`bool`, *optional*, defaults to `False`): whether there are images.
        """
        return self._engine.layout(self.model, is_multimodal)

    def train(self, *args, **kwargs):
        if self.use_liger_loss:
            # What is left of a training that was interrupted: the weights are still those that generated
            self._deferral.settle()
            self._merger.forget()
        return super().train(*args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        self._window_step = 0  # the host asks for the micro-batches of one accumulation window
        return super().get_batch_samples(*args, **kwargs)

    @property
    def _steps_left(self) -> int:
        """
        Micro-batches until the weights move, the current one included. Outside a training step it is not known: a loop
        of the user's own may move them at any time.
        """
        if not self._is_in_step or self.accelerator.sync_gradients:
            return int(self._is_in_step)
        return max(self.current_gradient_accumulation_steps - self._window_step, 1)

    @trl_compat.profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.use_liger_loss or return_outputs or replaced_behind(self, "compute_loss"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.compute_liger_loss(model, inputs)

    def compute_liger_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """
        Loss of one micro-batch, a scalar: TRL's `_compute_loss` on fused log-probabilities.

        Importance ratios, tool mask, normalizer, delta and bias-corrected KL go to the extended Liger loss, which
        answers with the gradient that each token will receive.
        """
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model, inputs):
        is_trls = not replaced_behind(self, "_compute_loss") and not replaced_method(self, trl_compat.OBJECTIVE_METHODS)
        if not self.use_liger_loss or not is_trls:
            return super()._compute_loss(model, inputs)
        check_micro_batch(inputs)
        own_inputs = dict(inputs)  # what is added for TRL is not for the buffered micro-batch
        with temporary_attr(self, "_loss_inputs", (inputs, own_inputs)), temporary_attr(self, "_loss_logps", None):
            if not replaces_kl(self):
                return super()._compute_loss(model, own_inputs)
            with kl_left_out(self):
                loss = super()._compute_loss(model, own_inputs)
            assert self._loss_logps is not None, "the host asked for log-probabilities"
            return loss + kl_term(self, own_inputs, self._loss_logps)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.use_liger_loss:
            return super().training_step(model, inputs, num_items_in_batch)
        backward = self.accelerator.backward

        @wraps(backward)  # whether it was replaced is seen through this
        def backward_of_forward(loss: Tensor, **options: Any) -> None:
            is_window_end = self.accelerator.sync_gradients
            is_padded = any(stats.layout == "padded" for stats in self._stats)
            # Checkpointed layers compute their attention again
            with cudnn_attention_off() if is_padded else nullcontext():
                self._merger.backward(loss, self._current_micro_batch, is_window_end, partial(backward, **options))

        with (
            temporary_attr(self.accelerator, "backward", backward_of_forward),
            temporary_attr(self, "_is_in_step", True),
        ):
            output = super().training_step(model, inputs, num_items_in_batch)
        self._window_step = 0 if self.accelerator.sync_gradients else self._window_step + 1
        if not self._merger.is_waiting:
            self._log_recomputed()
        return output

    def _log_recomputed(self) -> None:
        counts = [sum(s.recomputed for s in self._stats), sum(s.rows for s in self._stats)]
        if self.accelerator.num_processes > 1:
            local = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
            counts = self.accelerator.reduce(local, reduction="sum").tolist()
        recomputed, rows = counts
        self._metrics["train"]["fused/rows_recomputed"].append(recomputed / max(rows, 1))

    def _build_loss_request(self, inputs: dict[str, Any]) -> LogpsRequest:
        has_aux_loss = getattr(self, "aux_loss_enabled", False)
        skip_zero_grad = self._engine.option("fused_skip_zero_grad_sequences", False) and not has_aux_loss
        return build_loss_request(self, inputs, skip_zero_grad)

    @trl_compat.profiling_decorator
    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal,
    ):
        trls = super()._get_per_token_logps_and_entropies

        def trls_own():
            aux = {"compute_aux_loss": compute_aux_loss} if trl_compat.RETURNS_AUX_LOSS else {}
            flags = {"batch_size": batch_size, "compute_entropy": compute_entropy}  # TRL 1.14 takes them by name only
            return trls(model, input_ids, attention_mask, logits_to_keep, **flags, **aux, **multimodal)

        if not self.use_liger_loss:
            return trls_own()
        given = {name: value for name, value in multimodal.items() if value is not None}
        flags = (compute_entropy, compute_aux_loss, given)
        call = LogpsArgs(model, input_ids, attention_mask, logits_to_keep, batch_size, *flags)
        if self._deferral.takes(call):
            return trl_compat.logps_result(torch.zeros_like(call.completion_ids, dtype=torch.float32), None, None)
        is_own = replaced_method(self, ("_get_per_token_logps_and_entropies",)) is None
        is_of_loss = self._loss_inputs is not None and is_own
        reason = why_not_fused(self, model, self._engine.causal_lm(model))
        if reason is not None:
            logger.warning_once(f"TRL's own log-prob method is called, because {reason}.")
            logps, entropies, *aux = trls_own()
            logps = PerTokenLogps(logps, entropies, aux[0] if aux else None)
        elif is_of_loss:
            logps = self._loss_scores(call, trls)
        else:
            padding = why_padding_may_be_read(self, self._deferral.is_generating)
            padding = None if self._engine.is_forced else padding  # whoever asks for a layout says that nobody does
            logps = self._engine.compute(build_call_request(self, call, padding is not None), call, trls, padding)
        if is_of_loss:
            self._loss_logps = logps.logps
            self._deferral.fill_ratio(self._loss_inputs[1], logps.logps, self._step)
        return trl_compat.logps_result(logps.logps, trl_compat.entropies_as_trl(self, logps.entropies), logps.aux_loss)

    def _loss_scores(self, call: LogpsArgs, trl_method: Callable) -> PerTokenLogps:
        """The log-probabilities of the micro-batch whose loss TRL computes, and those that share its forward."""
        assert self._loss_inputs is not None
        inputs, _ = self._loss_inputs
        has_grad = torch.is_grad_enabled()
        kept = self._merger.logps_of(inputs) if has_grad else None
        if kept is not None:
            return kept
        together = self._merger.together(inputs, self._steps_left) if has_grad else [inputs]
        if len(together) > 1 and why_forwards_are_not_shared(self, self._engine.layout(call.model)) is not None:
            together = [inputs]  # what was found out or replaced since the plan
        logps_request = LogpsRequest.joined([self._build_loss_request(batch) for batch in together])
        if len(together) == 1:
            logps = [self._engine.compute(logps_request, call, trl_method)]
        else:
            ends_window = len(together) == self._steps_left
            with reducing_gradients(call.model) if ends_window else nullcontext():
                of_all = self._engine.compute(logps_request, call.of(together), trl_method)
            logps = of_all.split([len(batch["completion_ids"]) for batch in together])
            self._merger.keep(inputs, logps)
        if has_grad:
            self._stats = logps[0].stats
        return logps[0]

    def _generate_and_score_completions(self, inputs):
        if not self.use_liger_loss:
            return super()._generate_and_score_completions(inputs)
        self._engine.look_again()
        skip_old = self._engine.option("fused_skip_old_logps", None) is not False
        deferral = self._deferral
        with deferral.generation(self._steps_left, skip_old, self._engine.layout(self.model)):
            if not deferral.defers_old:
                return super()._generate_and_score_completions(inputs)
            output = super()._generate_and_score_completions(inputs)
            deferral.mark_old(output)
            return output

    def _prepare_inputs(self, generation_batch):  # ty: ignore[lost-keyword-for-regular-parameter] - the host's name
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.use_liger_loss or not self.model.training:
            return inputs
        if self._buffered_inputs is not before:
            batches: Any = self._buffered_inputs
            self._buffered_inputs = batches = self._merger.plan_generation(batches, self._steps_left)
            self._deferral.score_reference(self._merger.groups(self._steps_left))
            inputs = batches[self._step % int(self.args.steps_per_generation or 1)]
        self._current_micro_batch = inputs
        return inputs
