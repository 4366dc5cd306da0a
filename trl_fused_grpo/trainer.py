"""`FusedGRPOTrainer`: TRL's `GRPOTrainer` with its log-probabilities taken from the fused linear function."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from . import _trl_compat as compat
from .checks import check_aux_loss, check_kl_estimator, check_shapes, check_way, tell_what_has_no_effect
from .dealing import balance
from .fused_forward import attach
from .fused_linear import FusedStats
from .kl import kl_left_out, kl_term, replaces_kl
from .lm_head import has_adapter, output_projection
from .passes import LossPass, pass_ends, token_limit
from .question import DEFERRED, ask_for_loss, padding_counts
from .replacing import replaced
from .sampling import SAMPLING_METRICS, SamplingMetrics
from .scorer import Scorer
from .scoring import HostCall, Question, Scores
from .window import why_not_balanced, why_old_logps_are_needed, why_passes_are_not_shared


logger = logging.get_logger(__name__)


class FusedGRPOTrainer(GRPOTrainer):
    """
    Drop-in for [`~trl.GRPOTrainer`]: the same constructor, objective and metrics, without `[batch, length, vocab]`
    logits.

    With `use_liger_loss=True` in its arguments, every log-probability (policy, old policy, reference) comes from the
    fused linear function; TRL's own `_compute_loss` turns them into the loss. With `use_liger_loss=False` it is the
    stock trainer. `use_liger_kernel=True` means the fused loss and Liger's layer kernels.

    Micro-batches of an accumulation window may share a pass of the model (`fused_pass_tokens`). Those that wait for the
    last of it return a loss of zero, which then comes with the loss of the last.

    Beside TRL's metrics it logs `fused/rows_recomputed`, the fraction of rows whose gradient was not as forecast.

    Raises:
        `ValueError`: in the constructor, when model or options cannot be fused; the message says what to change.
    """

    args: GRPOConfig
    model: nn.Module
    _tag_names: ClassVar[list[str]] = [*getattr(GRPOTrainer, "_tag_names", []), "fused-grpo"]  # ty: ignore[incompatible-attribute-override]

    def __init__(self, *args: Any, **kwargs: Any):
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        config: Any = given.get("args")
        model = given.get("model")
        layer_kernels = getattr(config, "use_liger_kernel", False)
        self.use_liger_loss = bool(getattr(config, "use_liger_loss", False) or layer_kernels)
        self._stats: list[FusedStats] = []
        self._loss_pass: LossPass | None = None
        self._loss_logps: Tensor | None = None
        self._waiting: list[dict[str, Any]] = []
        self._pass_ends: list[int] = []
        self._defers_next_pass = False
        self._sampling_metrics = SamplingMetrics()
        self._scorer = Scorer(self)
        self._dealt = False
        if not self.use_liger_loss:
            super().__init__(*args, **kwargs)
            check_kl_estimator(self)
            return
        if isinstance(model, PreTrainedModel):
            output_projection(model)  # before the host fails on it with less to say
        with compat.liger_flag_lowered(config), compat.adapter_on_head_allowed():
            super().__init__(*args, **kwargs)
        check_way(self, self._scorer.option("fused_way", "auto"))
        check_aux_loss(self, self._scorer.causal_lm(self.model))
        check_kl_estimator(self)
        if layer_kernels and self.accelerator.device.type == "cpu":
            compat.leave_layers(config)
        elif layer_kernels:
            compat.apply_liger_layer_kernels(self._scorer.causal_lm(self.model), config)
        policies: tuple[Any, ...] = (self.model, self.ref_model)
        for policy in policies:
            if policy is not None:
                head = output_projection(self._scorer.causal_lm(policy))
                if has_adapter(head) and self.args.cast_lm_head_to_fp32:
                    raise ValueError(
                        "cast_lm_head_to_fp32=True does not go with a PEFT adapter on lm_head: remove 'lm_head' from "
                        "target_modules, or set cast_lm_head_to_fp32=False."
                    )
                attach(self._scorer.causal_lm(policy))
        tell_what_has_no_effect(self, lambda: self._scorer.layout(self.model))

    @property
    def fused_stats(self) -> FusedStats:
        """What the fused function did in the last loss pass; its backward fills in `recomputed`."""
        return self._stats[-1] if self._stats else FusedStats()

    def train(self, *args, **kwargs):
        self._waiting = []  # of a training that was interrupted
        return super().train(*args, **kwargs)

    @compat.profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.use_liger_loss or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._may_wait(inputs):
            self._waiting.append(inputs)
            self._stats = []
            return torch.zeros((), device=self.accelerator.device)
        if not self._waiting or not self.model.training:
            return self.compute_liger_loss(model, inputs)
        micro_batches, self._waiting = [*self._waiting, inputs], []
        return self._loss_of_pass(model, micro_batches)

    def compute_liger_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """
        Loss of one micro-batch, a scalar: TRL's `_compute_loss` on fused log-probabilities.

        Importance ratios, tool mask, normalizer, delta and bias-corrected KL go to the extended Liger loss, which
        answers with the gradient that each token will receive.
        """
        return self._loss_of_pass(model, [inputs])

    def _loss_of_pass(self, model: nn.Module, micro_batches: list[dict[str, Any]]) -> Tensor:
        """Sum of the losses of micro-batches that share one forward of the model."""
        for inputs in micro_batches:
            check_shapes(inputs)
        self._stats = []
        micro_batches = [dict(inputs) for inputs in micro_batches]
        questions = [self._ask_for_loss(inputs) for inputs in micro_batches]
        self._loss_pass = loss_pass = LossPass(micro_batches, questions, self._step)
        try:
            losses = [self._host_loss(model, loss_pass.turn_to(i)) for i in range(len(micro_batches))]
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        finally:
            self._loss_pass = self._loss_logps = None

    def _host_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not replaces_kl(self):
            return self._compute_loss(model, inputs)
        with kl_left_out(self):
            loss = self._compute_loss(model, inputs)
        assert self._loss_logps is not None, "the host asked for log-probabilities"
        return loss + kl_term(self, inputs, self._loss_logps)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.use_liger_loss:
            return super().training_step(model, inputs, num_items_in_batch)
        backward = self.accelerator.backward

        def backward_of_pass(loss: Tensor, **options: Any) -> None:
            if not self._waiting:  # what waits has no graph yet
                backward(loss, **options)

        with replaced(self.accelerator, "backward", backward_of_pass):
            output = super().training_step(model, inputs, num_items_in_batch)
        if not self._waiting:
            counts = [sum(s.recomputed for s in self._stats), sum(s.rows for s in self._stats)]
            if self.accelerator.num_processes > 1:
                local = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
                counts = self.accelerator.reduce(local, reduction="sum").tolist()
            recomputed, rows = counts
            self._metrics["train"]["fused/rows_recomputed"].append(recomputed / max(rows, 1))
        return output

    def _ask_for_loss(self, inputs: dict[str, Any]) -> Question:
        has_aux_loss = getattr(self, "aux_loss_enabled", False)
        skip_dead = self._scorer.option("fused_skip_dead_sequences", False) and not has_aux_loss
        return ask_for_loss(self, inputs, skip_dead)

    @property
    def _steps_per_generation(self) -> int:
        return int(self.args.steps_per_generation or 1)  # the host's configuration has filled it in

    @compat.profiling_decorator
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
        if not self.use_liger_loss:
            aux = {"compute_aux_loss": compute_aux_loss} if compat.SEAM_RETURNS_AUX_LOSS else {}
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,  # TRL 1.14 takes it by name only
                compute_entropy=compute_entropy,
                **aux,
                **multimodal,
            )
        completion_ids = input_ids[:, -logits_to_keep:]  # [B, T]
        if self._defers_next_pass:
            self._defers_next_pass = False  # whatever the host makes of these, `_generate_and_score_completions` drops
            nothing = torch.zeros_like(completion_ids, dtype=torch.float32)
            return compat.seam_result(nothing, None, None)

        multimodal = {name: value for name, value in multimodal.items() if value is not None}
        flags = (compute_entropy, compute_aux_loss, multimodal)
        call = HostCall(model, input_ids, attention_mask, logits_to_keep, batch_size, *flags)
        host_seam = super()._get_per_token_logps_and_entropies
        loss_pass = self._loss_pass
        if loss_pass is not None and loss_pass.asks_for(completion_ids):
            scores = loss_pass.scores(lambda question, call: self._scorer.scores(question, call, host_seam), call)
            self._finish_loss_pass(loss_pass, scores)
        else:
            completion_mask = attention_mask[:, -logits_to_keep:]
            question = Question(torch.ones_like(completion_mask) if padding_counts(self) else completion_mask)
            scores = self._scorer.scores(question, call, host_seam)
        return compat.seam_result(scores.logps, compat.host_entropies(self, scores.entropies), scores.aux_loss)

    def _finish_loss_pass(self, loss_pass: LossPass, scores: Scores) -> None:
        """Give the host the importance ratio that generation left out, before it reads it."""
        self._loss_logps = scores.logps
        if torch.is_grad_enabled():
            self._stats += scores.stats
        inputs = loss_pass.inputs
        if DEFERRED not in inputs:
            return
        mask = compat.loss_mask(self, inputs)
        values = scores.logps.detach(), inputs["sampling_per_token_logps"], mask
        correction = compat.sampling_correction(self)
        inputs["importance_sampling_ratio"] = ratio = correction.ratio(*values)
        steps = self._steps_per_generation
        place = loss_pass.step % (steps * self.num_iterations)
        if place < steps:  # later iterations see the same sequences again
            self._sampling_metrics.add(correction, *values, ratio)
        if place == steps - 1:
            for name, value in self._sampling_metrics.gathered(self.accelerator).items():
                self._metrics["train"][name].append(value)
            self._sampling_metrics = SamplingMetrics()

    def _generate_and_score_completions(self, inputs):
        may_skip = self._scorer.option("fused_skip_old_logps", None) is not False
        defers = self.use_liger_loss and self.model.training and may_skip
        if not defers or why_old_logps_are_needed(self) is not None:
            return super()._generate_and_score_completions(inputs)
        metrics = self._metrics["train"]
        logged = {name: list(metrics.get(name, [])) for name in SAMPLING_METRICS}
        self._sampling_metrics = SamplingMetrics()
        self._defers_next_pass = True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._defers_next_pass = False
        for name, values in logged.items():  # what was logged meanwhile is not true yet
            metrics[name] = values
            if not values:
                del metrics[name]
        del output["old_per_token_logps"], output["importance_sampling_ratio"]
        output[DEFERRED] = torch.tensor(True)
        return output

    def _prepare_inputs(self, generation_batch):  # ty: ignore[lost-keyword-for-regular-parameter] - the host's name
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.use_liger_loss or not self.model.training or self._buffered_inputs is before:
            return inputs
        batches: Any = self._buffered_inputs
        layout, shares_prompts = self._scorer.layout(self.model), self._scorer.shares_prompts(self.model)
        if self._scorer.option("fused_balance", False) and self._is_free("fused_balance", why_not_balanced(self)):
            self._buffered_inputs = dealt = balance(batches, layout, shares_prompts)
            self._dealt = dealt is not batches
            batches, inputs = dealt, dealt[self._step % self._steps_per_generation]
        limit = self._scorer.option("fused_pass_tokens", None)
        may_share = self._is_free("fused_pass_tokens" if limit else None, self._why_passes_are_not_shared(layout))
        self._pass_ends = self._planned_passes(batches, limit, shares_prompts) if may_share else []
        return inputs

    def _is_free(self, asked_for: str | None, reason: str | None) -> bool:
        """Whether there is no reason against something; where it was asked for, the reason is logged once."""
        if reason is not None and asked_for is not None:
            logger.warning_once(f"{asked_for} has no effect, because {reason}.")
        return reason is None

    def _why_passes_are_not_shared(self, layout: str) -> str | None:
        if layout != "packed":
            return f"the layout of the rows is {layout!r}, not 'packed'"
        if type(self).compute_liger_loss is not FusedGRPOTrainer.compute_liger_loss:
            return "a subclass's compute_liger_loss takes one micro-batch"
        return why_passes_are_not_shared(self)

    def _planned_passes(self, batches: list[dict[str, Any]], limit: int | None, shares_prompts: bool) -> list[int]:
        """For each micro-batch of a generation batch, the last that may share a pass which begins there."""
        ends = pass_ends(batches, token_limit(batches) if limit is None else limit, shares_prompts)
        if self.accelerator.num_processes == 1:
            return ends
        # Every process must call the model at the same steps
        return self.accelerator.gather(torch.tensor([ends], device=self.accelerator.device)).amin(0).tolist()

    def _may_wait(self, inputs: dict[str, Any]) -> bool:
        """Whether a micro-batch waits for the next one, to share its pass of the model."""
        place = self._step % self._steps_per_generation
        batches: Any = self._buffered_inputs
        is_planned = self._pass_ends and self.model.training and inputs is batches[place]
        if not is_planned or self.accelerator.sync_gradients or self._scorer.borders_ignored:
            return False
        return self._pass_ends[place - len(self._waiting)] > place
