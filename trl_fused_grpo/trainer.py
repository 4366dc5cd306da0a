"""`FusedGRPOTrainer`: TRL's `GRPOTrainer` with its log-probabilities taken from the fused linear function."""

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from . import _trl_compat as compat
from .checkpointing import lean_checkpoints
from .checks import check_aux_loss, check_shapes, check_token_ids, check_way
from .fused_forward import BordersIgnoredError, attach
from .fused_linear import FusedStats
from .kl import kl_left_out, kl_term, replaces_kl
from .layout import LayoutName, keys_may_repeat, why_not_aligned, why_not_packed
from .lm_head import has_adapter, output_projection
from .question import DEFERRED, ask_for_loss, padding_counts
from .sampling import SAMPLING_METRICS, SamplingMetrics
from .scoring import Question, Scores, ScoringOptions, score
from .window import balance, why_not_balanced, why_old_logps_are_needed


logger = logging.get_logger(__name__)


class FusedGRPOTrainer(GRPOTrainer):
    """
    Drop-in for [`~trl.GRPOTrainer`]: the same constructor, objective and metrics, without `[batch, length, vocab]`
    logits.

    With `use_liger_loss=True` in its arguments, every log-probability (policy, old policy, reference) comes from the
    fused linear function; TRL's own `_compute_loss` turns them into the loss. With `use_liger_loss=False` it is the
    stock trainer. `use_liger_kernel=True` means the fused loss and Liger's layer kernels.

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
        self._loss_question: Question | None = None
        self._stats: list[FusedStats] = []
        self._loss_inputs: dict[str, Any] | None = None
        self._loss_logps: Tensor | None = None
        self._defers_next_pass = False
        self._sampling_metrics = SamplingMetrics()
        self._borders_ignored = self._dealt = False
        if not self.use_liger_loss:
            super().__init__(*args, **kwargs)
            return
        if layer_kernels and not torch.cuda.is_available():
            raise ValueError(
                "use_liger_kernel=True also replaces the model's layers by Triton ones, which need a GPU: set "
                "use_liger_loss=True instead to fuse the loss alone."
            )
        if isinstance(model, PreTrainedModel):
            output_projection(model)  # before the host fails on it with less to say
        with compat.liger_flag_lowered(config), compat.adapter_on_head_allowed():
            super().__init__(*args, **kwargs)
        check_way(self, self._option("fused_way", "auto"))
        check_aux_loss(self, self._causal_lm(self.model))
        if layer_kernels:
            compat.apply_liger_layer_kernels(self._causal_lm(self.model), config)
        policies: tuple[Any, ...] = (self.model, self.ref_model)
        for policy in policies:
            if policy is not None:
                head = output_projection(self._causal_lm(policy))
                if has_adapter(head) and self.args.cast_lm_head_to_fp32:
                    raise ValueError(
                        "cast_lm_head_to_fp32=True does not go with a PEFT adapter on lm_head: remove 'lm_head' from "
                        "target_modules, or set cast_lm_head_to_fp32=False."
                    )
                attach(self._causal_lm(policy))

    @property
    def fused_stats(self) -> FusedStats:
        """What the fused function did in the last loss pass; its backward fills in `recomputed`."""
        return self._stats[-1] if self._stats else FusedStats()

    @compat.profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.use_liger_loss or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.compute_liger_loss(model, inputs)

    def compute_liger_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """
        Loss of one micro-batch, a scalar: TRL's `_compute_loss` on fused log-probabilities.

        Importance ratios, tool mask, normalizer, delta and bias-corrected KL go to the extended Liger loss, which
        answers with the gradient that each token will receive.
        """
        check_shapes(inputs)
        self._stats = []
        self._loss_inputs = inputs = dict(inputs)
        self._loss_question = self._ask_for_loss(inputs)
        try:
            if not replaces_kl(self):
                return self._compute_loss(model, inputs)
            with kl_left_out(self):
                loss = self._compute_loss(model, inputs)
            assert self._loss_logps is not None, "the host asked for log-probabilities"
            return loss + kl_term(self, inputs, self._loss_logps)
        finally:
            self._loss_question = self._loss_inputs = self._loss_logps = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        output = super().training_step(model, inputs, num_items_in_batch)
        if self.use_liger_loss:
            counts = [sum(s.recomputed for s in self._stats), sum(s.rows for s in self._stats)]
            if self.accelerator.num_processes > 1:
                local = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
                counts = self.accelerator.reduce(local, reduction="sum").tolist()
            recomputed, rows = counts
            self._metrics["train"]["fused/rows_recomputed"].append(recomputed / max(rows, 1))
        return output

    def _ask_for_loss(self, inputs: dict[str, Any]) -> Question:
        skip_dead = self._option("fused_skip_dead_sequences", False) and not getattr(self, "aux_loss_enabled", False)
        return ask_for_loss(self, inputs, skip_dead)

    def _option(self, name: str, default: Any) -> Any:
        """An option of [`FusedGRPOConfig`], which the arguments need not be."""
        return getattr(self.args, name, default)

    @property
    def _steps_per_generation(self) -> int:
        return int(self.args.steps_per_generation or 1)  # the host's configuration has filled it in

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        # `unwrap_model` looks for DeepSpeed on the disk each time, where it is not installed
        bare = isinstance(model, PreTrainedModel) or compat.is_peft_model(model)
        return model if bare else self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def _causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        unwrapped = self._unwrapped(model)
        return compat.without_adapter(getattr(unwrapped, "_orig_mod", unwrapped))  # torch.compile

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

        question = self._loss_question
        is_loss_pass = question is not None and question.mask.shape == completion_ids.shape
        if not is_loss_pass:
            completion_mask = attention_mask[:, -logits_to_keep:]
            question = Question(torch.ones_like(completion_mask) if padding_counts(self) else completion_mask)
        unwrapped = self._unwrapped(model)
        causal_lm = self._causal_lm(unwrapped)
        attach(causal_lm)
        head: Any = output_projection(causal_lm)
        # Between forwards the weight may be a shard
        vocab_size = getattr(head, "out_features", head.weight.shape[0])
        check_token_ids(completion_ids, question.mask, vocab_size)

        multimodal = {name: value for name, value in multimodal.items() if value is not None}
        host_seam = super()._get_per_token_logps_and_entropies
        host_call = (host_seam, input_ids, attention_mask, logits_to_keep, multimodal)
        options = ScoringOptions(
            temperature=self.temperature,
            fp32=self.args.cast_lm_head_to_fp32,
            way=self._option("fused_way", "auto"),
            logits_mib=self._option("fused_logits_mib", None),
            layout=self._layout(unwrapped, bool(multimodal)),
            share_prompts=self._shares_prompts(unwrapped),
        )
        with self.accelerator.autocast(), lean_checkpoints(unwrapped):
            host_inputs = (lambda: compat.host_model_inputs(*host_call)) if multimodal else None
            batch = (model, input_ids, attention_mask, logits_to_keep, batch_size)
            wanted = (compute_entropy, compute_aux_loss, host_inputs)
            try:
                scores = score(question, options, *batch, *wanted)
            except BordersIgnoredError as error:
                if self._option("fused_layout", "auto") != "auto":
                    raise
                logger.warning(f"Rows are aligned instead of packed from now on, because {error}")
                self._borders_ignored = True
                scores = score(question, replace(options, layout="aligned"), *batch, *wanted)
        if is_loss_pass:
            self._finish_loss_pass(scores)
        return compat.seam_result(scores.logps, scores.entropies, scores.aux_loss)

    def _finish_loss_pass(self, scores: Scores) -> None:
        """Give the host the importance ratio that generation left out, before it reads it."""
        self._loss_logps = scores.logps
        if torch.is_grad_enabled():
            self._stats += scores.stats
        inputs = self._loss_inputs
        if inputs is None or DEFERRED not in inputs:
            return
        mask = compat.loss_mask(self, inputs)
        values = scores.logps.detach(), inputs["sampling_per_token_logps"], mask
        correction = compat.sampling_correction(self)
        inputs["importance_sampling_ratio"] = ratio = correction.ratio(*values)
        steps = self._steps_per_generation
        place = self._step % (steps * self.num_iterations)
        if place < steps:  # later iterations see the same sequences again
            self._sampling_metrics.add(correction, *values, ratio)
        if place == steps - 1:
            for name, value in self._sampling_metrics.gathered(self.accelerator).items():
                self._metrics["train"][name].append(value)
            self._sampling_metrics = SamplingMetrics()

    def _generate_and_score_completions(self, inputs):
        defers = self.use_liger_loss and self.model.training and self._option("fused_skip_old_logps", True)
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
        fresh = self.use_liger_loss and self.model.training and self._buffered_inputs is not before
        if not fresh or not self._option("fused_balance", True) or why_not_balanced(self) is not None:
            return inputs
        cut: Any = self._buffered_inputs
        dealt = balance(cut, self._layout(self.model), self._shares_prompts(self.model))
        self._buffered_inputs, self._dealt = dealt, dealt is not cut
        return dealt[self._step % self._steps_per_generation]

    def _shares_prompts(self, model: nn.Module) -> bool:
        return self._option("fused_share_prompts", True) and keys_may_repeat(self._causal_lm(model))

    def _layout(self, model: nn.Module, is_multimodal: bool = False) -> LayoutName:
        """
        The layout of this call's rows: the one asked for, or the first that the model allows.

        Raises:
            `ValueError`: when the one asked for is not allowed, with the reason.
        """
        wanted = self._option("fused_layout", "auto")
        unwrapped = self._unwrapped(model)
        reasons = {"aligned": why_not_aligned(unwrapped, is_multimodal, padding_counts(self)), "host": None}
        reasons["packed"] = reasons["aligned"] or why_not_packed(self._causal_lm(model))
        if self._borders_ignored:
            reasons["packed"] = "its attention ignores the borders of packed sequences"
        if wanted != "auto" and reasons[wanted] is not None:
            raise ValueError(f"fused_layout={wanted!r} does not fit this model: {reasons[wanted]}. Use 'auto'.")
        name = wanted if wanted != "auto" else next(n for n in ("packed", "aligned", "host") if reasons[n] is None)
        if name == "host" and wanted == "auto":
            logger.warning_once(f"Rows keep the padding of the host, because {reasons['aligned']}.")
        return name
