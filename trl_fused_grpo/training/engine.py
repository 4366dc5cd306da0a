"""
Log-probabilities of a trainer's batches: the layout that its model allows, in its wrappers and its precision. Then from
TRL's padded batch to its log-probs: sub-batches, layout, the model's forward, and back into place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn, where
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trl_images import multimodal_model_inputs
from trl_fused_grpo._utils import modules_as_they_are, of_all_processes
from trl_fused_grpo.loss.forecast import grad_rows_first
from trl_fused_grpo.modeling.attention.packed import watched_call
from trl_fused_grpo.modeling.attention.padded import padded_call
from trl_fused_grpo.modeling.attention.watch import WatchedCall, carry_arguments
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest, install_fused_forward
from trl_fused_grpo.modeling.head.output_projection import LogitScaling, logit_scaling
from trl_fused_grpo.modeling.layers.compiled import layers_to_compile, why_not_compiled
from trl_fused_grpo.modeling.layers.forward_override import restore_forward
from trl_fused_grpo.modeling.layers.unpacked import install_unpacking, uninstall_unpacking
from trl_fused_grpo.modeling.rows import layout as layouts
from trl_fused_grpo.modeling.rows.layout import HolesError, Layout
from trl_fused_grpo.modeling.rows.layout_choice import (
    depends_on_width,
    traits,
    why_not_packed,
    why_prompts_are_not_shared,
    why_wide_rows_differ,
)
from trl_fused_grpo.modeling.rows.multimodal import MultimodalInputs
from trl_fused_grpo.ops.forecast import Forecast
from trl_fused_grpo.ops.linear_logps import FusedStats
from trl_fused_grpo.options import FusedOptions, kl_estimator_of

from .findings import Findings, Ladder, Level, Reason, log_no_effect
from .memory import MemoryBudget, memory_budget
from .plan import token_counter, why_padding_is_mixed_in
from .requests import LogpsArgs, LogpsOptions, LogpsRequest, PerTokenLogps, padding_counts


logger = logging.get_logger(__name__)


class RowsRefusedError(RuntimeError):
    """A model treats rows in a way that is right only with TRL's padding."""


class PromptsNotSharedError(RuntimeError):
    """A model with images treats rows in a way that is right only where each sequence has its own prompt."""


class LogpsEngine:
    """Computes log-probabilities as the options of a trainer say."""

    def __init__(self, trainer: GRPOTrainer, defaults: FusedOptions, ladder: Ladder):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.ladder = ladder
        self.options = self._defaults = defaults
        # What TRL >= 1.15 reads of each model and the arguments when a trainer is made
        self._made_with: WeakKeyDictionary[PreTrainedModel, tuple[LogitScaling, float, bool]] = WeakKeyDictionary()
        self._unshared_with_images: WeakSet[nn.Module] = WeakSet()
        self.memory: MemoryBudget | None = None

    def read_options(self) -> None:
        """Read the options from the trainer's arguments."""
        self.options = FusedOptions.from_args(self.trainer.args, self._defaults)
        self.memory = memory_budget(self.trainer, self.options.fused_memory)

    @property
    def kl_estimator(self) -> str:
        """The option, which may be set after construction too."""
        return kl_estimator_of(self.trainer.args, self._defaults.kl_estimator)

    def install(self, model: nn.Module) -> None:
        """Let a model's forward take the keyword `fused`. Idempotent."""
        causal_lm = self.causal_lm(model)
        install_fused_forward(causal_lm)
        if causal_lm not in self._made_with:
            self._made_with[causal_lm] = self._head_options(causal_lm)

    def uninstall(self) -> None:
        """Undo every [`install`]. Idempotent."""
        for causal_lm in list(self._made_with):
            restore_forward(causal_lm)
            uninstall_unpacking(causal_lm)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """A model in no wrapper but PEFT's."""
        # Where DeepSpeed is not installed, `unwrap_model` looks for it on the disk at every call
        bare = isinstance(model, PreTrainedModel) or model_compat.is_peft_model(model)
        return model if bare else self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        return model_compat.causal_lm_of(model)

    def _head_options(self, causal_lm: PreTrainedModel) -> tuple[LogitScaling, float, bool]:
        """Scale and softcap, temperature, and whether the head runs in float32."""
        return logit_scaling(causal_lm), self.trainer.temperature, trainers.casts_head(self.trainer)

    def packs(self, model: nn.Module, findings: Findings) -> bool:
        """Return `True` if a model's rows are packed: nothing else was asked for, and level and model allow it."""
        policy = self.trainer.model
        is_reference = model is self.trainer.ref_model and model is not policy
        if is_reference and not self.packs(policy, self.ladder.findings):
            return False  # equal weights are to give equal bits
        if findings.level < Level.ROWS or self.options.fused_layout == "padded":
            return False
        with modules_as_they_are():
            reason = why_not_packed(self.unwrapped(model), self.causal_lm(model), padding_counts(self.trainer))
        if reason is not None and self.options.forces_rows:
            raise ValueError(f"fused_layout='packed' does not fit this model: {reason}. Leave it out.")
        if reason is not None:
            logger.warning_once(f"Rows keep TRL's padding, because {reason}.")
        return reason is None

    def shares_prompts(self, model: nn.Module) -> bool:
        """Return `True` if a prompt stands in a packed row once."""
        return self.options.fused_share_prompts and why_prompts_are_not_shared(self.causal_lm(model)) is None

    def compute(
        self,
        logps_request: LogpsRequest,  # at which positions of the batch
        call: LogpsArgs,  # TRL's call
        trl_method: Callable,  # TRL's own method for it, which knows how images belong to rows
        findings: Findings | None = None,  # those that count for the call. By default the training's
    ) -> PerTokenLogps:
        """Compute log-probabilities of a batch, and what else TRL asks for."""
        findings = self.ladder.findings if findings is None else findings
        unwrapped, accelerator = self.unwrapped(call.model), self.trainer.accelerator
        causal_lm = self.causal_lm(unwrapped)
        self.install(unwrapped)
        images = multimodal_inputs(call, trl_method) if call.multimodal else None
        shape = widest_batch(accelerator, causal_lm, (len(call.input_ids), call.input_ids.shape[1]))
        with accelerator.autocast():
            is_known = findings.level >= Level.ROWS and findings.knows_model
            if is_known and self.memory is not None and torch.is_grad_enabled():
                tokens = self.tokens_of_forward(call, findings)
                self.memory.begin(self.trainer.state.global_step, tokens, unwrapped.parameters())
            while True:
                options = self._logps_options(call, findings, shape)
                if images is not None and causal_lm in self._unshared_with_images:
                    options = replace(options, share_prompts=False)
                if not options.packed:
                    if logps_request.micro_batch is not None:  # they share a forward, but are not to share padding
                        call = replace(call, batch_size=logps_request.micro_batch)
                    return compute_logps(logps_request, options, call, images)
                install_unpacking(causal_lm)
                before = RandomStates(call.input_ids)
                try:
                    return compute_logps(logps_request, options, call, images)
                except PromptsNotSharedError:
                    self._unshared_with_images.add(causal_lm)
                except RowsRefusedError as error:
                    findings = self._refuse(findings, error)
                before.restore()

    def tokens_of_forward(self, call: LogpsArgs, findings: Findings) -> int:
        """Tokens that the model runs in a forward, padding included, counted as the plan counts them."""
        if not self.packs(call.model, findings):
            return call.input_ids.numel()
        ids, mask, width = call.input_ids, call.attention_mask, call.logits_to_keep
        batch = {"prompt_ids": ids[:, :-width], "prompt_mask": mask[:, :-width], "completion_mask": mask[:, -width:]}
        tokens_from = token_counter([batch], self.shares_prompts(call.model))
        return ids.numel() if tokens_from is None else next(tokens_from(0))

    def layers_to_compile(self, model: nn.Module) -> tuple[list[tuple[int, Any]], str | None]:
        """The layers of a model that run compiled, each with its number, and where none do the reason."""
        reason = why_not_compiled(self.options.fused_compile, self.trainer.accelerator.device)
        return layers_to_compile(model) if reason is None else ([], reason)

    def _refuse(self, findings: Findings, error: RowsRefusedError) -> Findings:
        """
        Have rows keep TRL's padding from now on, and return the findings with that. All processes decide alike, because
        the decision does not depend on the batch.
        """
        if self.options.forces_rows:
            raise ValueError(f"fused_layout='packed' does not fit this model: {error}. Leave it out.") from error
        reason = Reason(Level.HEAD, str(error))
        self.ladder.fall(reason)
        return Findings((*findings.reasons, reason))

    def _logps_options(self, call: LogpsArgs, findings: Findings, shape: tuple[int, int]) -> LogpsOptions:
        causal_lm = self.causal_lm(call.model)
        packed = self.packs(call.model, findings)
        if traits(causal_lm).needs_last_column and call.compute_aux_loss:
            packed = False  # the auxiliary loss counts every token, also one that stands for the last column
        if packed and (reason := why_wide_rows_differ(causal_lm, *shape)) is not None:
            keep_padding(reason, self.options.forces_rows)
            packed = False
        compiled: list[tuple[int, Any]] = []
        if packed and findings.knows_model:
            compiled, reason = self.layers_to_compile(self.unwrapped(call.model))
            log_no_effect("fused_compile=True" if self.options.fused_compile else None, reason)
        scaling, temperature, fp32 = self._made_with[causal_lm]
        if trl_compat.LOGPS_FROM_LOGITS:
            scaling, temperature, _ = self._head_options(causal_lm)
        return LogpsOptions(
            causal_lm=causal_lm,
            scaling=scaling,
            temperature=temperature,
            fp32=fp32,
            fused=self.options,
            packed=packed,
            share_prompts=self.shares_prompts(call.model),
            compiled=compiled,
            is_known=findings.knows_model,
            opens_masks=not packed and findings.knows_model and why_padding_is_mixed_in(causal_lm) is None,
        )


class RandomStates:
    """States of the random number generators of the CPU and of a tensor's device."""

    def __init__(self, like: Tensor):
        self._of_cpu, self._of_device = torch.get_rng_state(), get_device_states(like)

    def restore(self) -> None:
        """Set the generators to what they were."""
        torch.set_rng_state(self._of_cpu)
        set_device_states(*self._of_device)


def widest_batch(accelerator: Any, causal_lm: PreTrainedModel, shape: tuple[int, int]) -> tuple[int, int]:
    """
    The `shape` of a batch in TRL's padding, sequences and columns. Where it decides whether rows may be packed, each is
    the most of any process.
    """
    size, width = shape
    if depends_on_width(causal_lm):
        size, width = of_all_processes(accelerator, "shape of rows", [size, width]).amax(0).tolist()
    return size, width


# One batch


class SubBatch:
    """Selects positions of a sub-batch, and puts what is computed for them back in place."""

    def __init__(self, logps_request: LogpsRequest, rows: Tensor):
        self.selected = logps_request.mask[rows].bool()  # [b, T]
        self.forecast: Forecast | None = None
        self._fill = None if logps_request.fill is None else logps_request.fill[rows]  # [b, T]
        self._skipped: Tensor | None = None  # [b, T], bool: positions of sequences that are left out of the model
        self._leaves_out = False  # any
        forecast = logps_request.forecast
        if forecast is None:
            self.positions, _ = grad_rows_first(self.selected, None)
            return
        needs_grad = self.selected & forecast.needs_grad[rows]
        if logps_request.skippable is not None:
            # One with a token stays: metrics are then of something, and [`layout.packed`] runs one anyway
            kept = needs_grad.any(1) | ~logps_request.skippable[rows]  # [b]
            kept = _with_one_of(self.selected.any(1), kept).unsqueeze(1)  # [b, 1]
            self._skipped, self.selected = self.selected & ~kept, self.selected & kept
            self._leaves_out = bool(self._skipped.any())
        # What needs no gradient comes last, so that it never enters a matmul of the backward
        self.positions, grad_rows = grad_rows_first(self.selected, needs_grad)
        width = self.selected.shape[1]
        in_batch = rows[self.positions // width] * width + self.positions % width  # [N], flat in [B, T]
        self.forecast = forecast.at(in_batch, grad_rows)

    def in_place(self, results: tuple[Tensor, ...], has_entropies: bool, stats: FusedStats) -> PerTokenLogps:
        """Put results back to where they belong in `[b, T]`."""
        values, stats.leaves_out = iter(results), self._leaves_out
        logps = self._scatter(next(values), self._fill)
        entropies = None
        if has_entropies:
            projected = next(values)  # [N]
            entropies = self._scatter(projected, None)
            if self._skipped is not None:
                # The mean over the mask is then the mean over the sequences that went through the model
                entropies = where(self._skipped, projected.detach().mean(), entropies)
        left_out = None if self._skipped is None else self._skipped.any(1)
        return PerTokenLogps(logps, entropies, next(values, None), [stats], left_out)

    def _scatter(self, values: Tensor, fill: Tensor | None) -> Tensor:
        shape = self.selected.shape
        base = values.new_zeros(shape) if fill is None else fill.to(values.dtype)
        return base.flatten().index_put((self.positions,), values).view(shape)


def _with_one_of(candidates: Tensor, chosen: Tensor) -> Tensor:
    """The `chosen` sequences `[b]`, and the first of the `candidates` `[b]` where none of these is chosen."""
    first = candidates & (candidates.cumsum(0) == 1)
    return chosen | first & ~(chosen & candidates).any()


def compute_logps(
    logps_request: LogpsRequest, options: LogpsOptions, call: LogpsArgs, images: MultimodalInputs | None
) -> PerTokenLogps:
    """Compute log-probabilities at the requested positions of a batch."""
    size = len(call.input_ids) if call.batch_size is None else call.batch_size
    if images is not None and not images.are_known_by_row:
        keep_padding("which images belong to which row is not known", options.packed and options.fused.forces_rows)
        options, size = replace(options, packed=False), len(call.input_ids)
    parts = torch.arange(len(call.input_ids), device=call.input_ids.device).split(size)  # as TRL splits it
    rows_of_images = None if images is None else RowsWithImages(images, options, call)
    results = []
    for rows in parts:
        sub_batch = SubBatch(logps_request, rows)
        layout = lay_out(options, call, rows, sub_batch.selected, rows_of_images)
        micro_batch = min(logps_request.micro_batch or len(rows), len(rows))
        in_row = 0 if layout.row is None else len(layout.row.index)
        logit_positions = layout.logit_positions  # [b, T]
        request = FusedRequest(
            sub_batch.positions,
            call.completion_ids[rows],
            options.temperature,
            options.scaling,
            sub_batch.forecast,
            logit_positions=None if logit_positions is None else logit_positions.flatten()[sub_batch.positions],
            fp32=options.fp32,
            aux_loss=call.compute_aux_loss,
            compiled=options.compiled,
            backward=options.fused.fused_backward or "auto",
            logits_mib=options.fused.fused_logits_mib,
            tokens=max(in_row, micro_batch * call.input_ids.shape[1]),
            entropy=call.compute_entropy,
            entropy_grad=logps_request.entropy_grad,
            head_grad=logps_request.head_grad,
        )
        values = run_model(call.model, layout, request, options)
        request.stats.layout = "padded" if layout.row is None else "packed"
        results.append(sub_batch.in_place(values, call.compute_entropy, request.stats))
    return _together(results)


def lay_out(
    options: LogpsOptions, call: LogpsArgs, rows: Tensor, selected: Tensor, images: "RowsWithImages | None" = None
) -> Layout:
    """The layout of some sequences of a batch."""
    in_model = selected.any(1) | call.compute_aux_loss  # [b], the auxiliary loss counts every sequence
    if images is not None and options.packed:
        in_model = images.with_some(in_model, rows)
    shares_prompts = options.share_prompts and not call.compute_aux_loss
    tensors = call.input_ids[rows], call.attention_mask[rows], call.logits_to_keep, selected, in_model
    keys = None if images is None else images.keys
    needs_last_column = traits(options.causal_lm).needs_last_column
    padded_rows = layouts.Rows(*tensors, needs_last_column, None if keys is None else keys[rows])
    try:
        if options.packed:
            layout = layouts.packed(padded_rows, shares_prompts and (images is None or keys is not None))
            return layout if images is None else images.inputs.packed(layout, rows.tolist(), images.position_ids)
    except HolesError as error:
        keep_padding(str(error), options.fused.forces_rows)
    if images is not None:
        return Layout(images.inputs.padded(rows.tolist()))
    return Layout({"input_ids": padded_rows.input_ids, "attention_mask": padded_rows.attention_mask})


def keep_padding(reason: str, is_forced: bool) -> None:
    """Log why a batch keeps TRL's padding, or raise where packed rows were asked for."""
    if is_forced:
        raise ValueError(f"fused_layout='packed' does not fit this batch: {reason}. Leave it out.")
    logger.warning_once(f"Batches keep TRL's padding where {reason}.")


def multimodal_inputs(call: LogpsArgs, trl_method: Callable) -> MultimodalInputs:
    """The inputs that TRL would give a multimodal model; its own `trl_method` tells, see [`MultimodalInputs`]."""

    def of_first_rows(count: int) -> dict[str, Any]:
        rows = call.input_ids[:count], call.attention_mask[:count], call.logits_to_keep, call.multimodal
        return multimodal_model_inputs(trl_method, *rows)

    return MultimodalInputs(of_first_rows, len(call.input_ids))


class RowsWithImages:
    """What the sequences of a batch with images need beside their tokens."""

    def __init__(self, inputs: MultimodalInputs, options: LogpsOptions, call: LogpsArgs):
        self.inputs, self.keys, self.position_ids = inputs, None, None
        if not options.packed:
            return
        causal_lm, width = options.causal_lm, call.logits_to_keep
        self.position_ids = inputs.position_ids(causal_lm)
        if options.share_prompts and not call.compute_aux_loss and inputs.may_share_prompts(causal_lm, width):
            first = layouts.first_with_the_prompt(call.input_ids[:, :-width], call.attention_mask[:, :-width].bool())
            self.keys = inputs.image_keys(first.tolist())

    def with_some(self, in_model: Tensor, rows: Tensor) -> Tensor:
        """
        Which of these sequences `[b]` are in the model `[b]`: one with images among them if there is any, so that each
        process runs the vision tower, whose weights FSDP and ZeRO-3 gather on all.
        """
        with_images = self.inputs.rows_with_images
        if len(with_images) in (0, self.inputs.count):
            return in_model
        has_images = torch.zeros(self.inputs.count, dtype=torch.bool)
        has_images[with_images] = True
        return _with_one_of(has_images.to(rows.device)[rows], in_model)


def run_model(model: nn.Module, layout: Layout, request: FusedRequest, options: LogpsOptions) -> tuple[Tensor, ...]:
    """Call the model with a request, and raise where it does not fit the layout."""
    if layout.row is None and not options.is_known:
        results = model(**layout.model_inputs, fused=request)
    elif layout.row is None:
        with padded_call(model, options.opens_masks, request.stats):
            results = model(**layout.model_inputs, fused=request)
    else:
        row = layout.row
        with watched_call(WatchedCall(row.lengths, row.has_images, row.shares_prompts), model) as call:
            # Every layer gets it, as it gets cu_seqlens: a checkpointed layer is computed again in the backward
            model_inputs = {**layout.model_inputs, "watched": call}
            carry_arguments(model_inputs)
            results = model(**model_inputs, fused=request)
        if call.reason is not None:
            raise RowsRefusedError(call.reason)
        if call.needs_own_prompts:
            raise PromptsNotSharedError
    return tuple(result.real for result in results)


def _together(results: list[PerTokenLogps]) -> PerTokenLogps:
    """The results of all sub-batches as one; auxiliary losses are averaged."""
    entropies = [result.entropies for result in results if result.entropies is not None]
    aux_losses = [result.aux_loss for result in results if result.aux_loss is not None]
    left_out = [result.left_out for result in results if result.left_out is not None]
    return PerTokenLogps(
        logps=torch.cat([result.logps for result in results]),
        entropies=torch.cat(entropies) if entropies else None,
        aux_loss=torch.stack(aux_losses).mean() if aux_losses else None,
        stats=[stats for result in results for stats in result.stats],
        left_out=torch.cat(left_out) if left_out else None,
    )
