"""From TRL's padded batch to its log-probabilities: sub-batches, layout, the model's forward, and back into place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, where
from transformers.utils import logging

from trl_fused_grpo._compat.trl_images import multimodal_model_inputs
from trl_fused_grpo.loss.forecast import grad_rows_first
from trl_fused_grpo.modeling.attention.packed import watched_call
from trl_fused_grpo.modeling.attention.padded import padded_call
from trl_fused_grpo.modeling.attention.watch import WatchedCall, carry_arguments
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest
from trl_fused_grpo.modeling.rows import layout as layouts
from trl_fused_grpo.modeling.rows.layout import HolesError, Layout
from trl_fused_grpo.modeling.rows.multimodal import MultimodalInputs
from trl_fused_grpo.ops.forecast import Forecast
from trl_fused_grpo.ops.linear_logps import FusedStats

from .requests import LogpsArgs, LogpsOptions, LogpsRequest, PerTokenLogps


logger = logging.get_logger(__name__)


class RowsRefusedError(RuntimeError):
    """A model treats rows in a way that is right only with TRL's padding."""


class PromptsNotSharedError(RuntimeError):
    """A model with images treats rows in a way that is right only where each sequence has its own prompt."""


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
        keep_padding("which images belong to which row is not known", options.packed and options.forces_rows)
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
            backward=options.backward,
            logits_mib=options.logits_mib,
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
    padded_rows = layouts.Rows(*tensors, options.needs_last_column, None if keys is None else keys[rows])
    try:
        if options.packed:
            layout = layouts.packed(padded_rows, shares_prompts and (images is None or keys is not None))
            return layout if images is None else images.inputs.packed(layout, rows.tolist(), images.position_ids)
    except HolesError as error:
        keep_padding(str(error), options.forces_rows)
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
        with padded_call(model, options.opens_masks) as padded:
            results = model(**layout.model_inputs, fused=request)
        request.stats.leaves_cudnn_off = padded.leaves_cudnn_off
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
