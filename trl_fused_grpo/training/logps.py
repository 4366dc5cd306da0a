"""From a host's padded batch to its log-probabilities: layout, sub-batches, projection, and back into place."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from trl_fused_grpo.loss.forecast import BatchForecast, grad_rows_first
from trl_fused_grpo.loss.importance_sampling import DeferredForecast
from trl_fused_grpo.modeling import layout as layouts
from trl_fused_grpo.modeling.fused_forward import FusedRequest
from trl_fused_grpo.modeling.layout import HolesError, Layout, LayoutName, Rows
from trl_fused_grpo.modeling.packed_attention import cudnn_attention_off, watched_call
from trl_fused_grpo.ops.linear_logps import FusedStats

from .partitioning import split_rows


@dataclass(frozen=True)
class LogpsRequest:
    """
    Which positions of a batch to score.

    Args:
        mask (`Tensor`): `[B, T]`: the positions whose log-probability is read.
        fill (`Tensor`, *optional*): `[B, T]`: stands where nothing is projected; zero without.
        forecast ([`BatchForecast`] or [`DeferredForecast`], *optional*): the gradients that will come back.
        entropy_grad (`bool`): whether entropies will receive a gradient.
        skip_zero_grad (`bool`): whether sequences that can receive no gradient are left out of the model.
        micro_batch (`int`, *optional*): sequences in each of the micro-batches that are joined here.
    """

    mask: Tensor
    fill: Tensor | None = None
    forecast: BatchForecast | DeferredForecast | None = None
    entropy_grad: bool = False
    skip_zero_grad: bool = False
    micro_batch: int | None = None

    @classmethod
    def joined(cls, parts: list["LogpsRequest"]) -> "LogpsRequest":
        """The questions of several micro-batches of one accumulation window, alike but for their tensors."""
        if len(parts) == 1:
            return parts[0]
        fills = [part.fill for part in parts if part.fill is not None]
        forecasts: list[Any] = [part.forecast for part in parts if part.forecast is not None]
        return replace(
            parts[0],
            mask=torch.cat([part.mask for part in parts]),
            fill=torch.cat(fills) if fills else None,
            forecast=type(forecasts[0]).joined(forecasts) if forecasts else None,
            micro_batch=len(parts[0].mask),
        )


logger = logging.get_logger(__name__)


class RowsRefusedError(RuntimeError):
    """A model does something with its rows that only the host's layout leaves as it is."""


@dataclass(frozen=True)
class LogpsOptions:
    """
    Temperature of the sampler, and how to run the head and lay out the rows.

    Args:
        forced (`bool`): whether the layout was asked for, so that no other may stand in for it.
        needs_last_column (`bool`): see [`layout_choice.Traits`].
        runs_sdpa (`bool`): whether attention goes through SDPA, where it is watched.
    """

    temperature: float
    fp32: bool
    backward: str
    logits_mib: float | None
    layout: LayoutName
    share_prompts: bool
    forced: bool = False
    needs_last_column: bool = False
    runs_sdpa: bool = True


@dataclass(frozen=True)
class LogpsArgs:
    """
    A call of the host's log-prob seam, under its names.

    Args:
        model (`nn.Module`): in all its wrappers; it takes the keyword `fused`.
        input_ids, attention_mask (`Tensor`): `[B, P + T]`, prompts padded left and completions right.
        logits_to_keep (`int`): `T`.
        batch_size (`int`, *optional*): sequences in a sub-batch; all without.
        compute_entropy, compute_aux_loss (`bool`): what to compute beside log-probabilities.
        multimodal (`dict`): pixels and what goes with them.
    """

    model: nn.Module
    input_ids: Tensor
    attention_mask: Tensor
    logits_to_keep: int
    batch_size: int | None
    compute_entropy: bool
    compute_aux_loss: bool
    multimodal: dict[str, Any]

    @property
    def completion_ids(self) -> Tensor:
        """`[B, T]`."""
        return self.input_ids[:, -self.logits_to_keep :]

    def of(self, micro_batches: list[dict[str, Any]]) -> "LogpsArgs":
        """The same call for several micro-batches, one after the other."""
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        ids, mask = (
            torch.cat([torch.cat([batch[left], batch[right]], dim=1) for batch in micro_batches])
            for left, right in names
        )
        return replace(self, input_ids=ids, attention_mask=mask)


@dataclass
class PerTokenLogps:
    """Log-probabilities and entropies `[B, T]`, the auxiliary loss (a scalar), and statistics of each sub-batch."""

    logps: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None
    stats: list[FusedStats] = field(default_factory=list)

    def split(self, sizes: list[int]) -> list["PerTokenLogps"]:
        """The scores of several micro-batches as those of each; the first has the statistics."""
        entropies = [None] * len(sizes) if self.entropies is None else self.entropies.split(sizes)
        pairs = zip(self.logps.split(sizes), entropies, strict=True)
        return [
            PerTokenLogps(logps, entropy, self.aux_loss, [] if i else self.stats)
            for i, (logps, entropy) in enumerate(pairs)
        ]


def compute_logps(
    logps_request: LogpsRequest, options: LogpsOptions, call: LogpsArgs, trl_inputs: Callable[[], dict[str, Any]] | None
) -> PerTokenLogps:
    """
    Score the asked positions of a batch.

    Args:
        question ([`LogpsRequest`]): what to score.
        options ([`LogpsOptions`]): how.
        call ([`LogpsArgs`]): the batch, the model, and what else to compute.
        trl_inputs (`Callable`, *optional*): gives the keyword arguments of a multimodal model for the whole batch.
    """
    input_ids, attention_mask, completion_length = call.input_ids, call.attention_mask, call.logits_to_keep
    compute_aux_loss = call.compute_aux_loss
    # How images go with rows is the host's business: it is asked for the whole batch at once
    size = len(input_ids) if call.batch_size is None or trl_inputs is not None else call.batch_size
    shares = options.share_prompts and not compute_aux_loss  # the auxiliary loss counts every token
    parts = split_rows(input_ids, attention_mask, completion_length, size, options.layout, shares)
    pieces, stats = [], []
    for rows in parts:
        sub = _SubBatch(logps_request, rows)
        if trl_inputs is not None:
            layout = Layout("padded", trl_inputs())
        else:
            wanted = sub.scored.any(1) | compute_aux_loss  # the auxiliary loss counts every sequence
            tensors = input_ids[rows], attention_mask[rows], completion_length, sub.scored, wanted
            layout = _lay_out(options, Rows(*tensors, options.needs_last_column), shares, compute_aux_loss)
        request = FusedRequest(
            sub.positions,
            call.completion_ids[rows],
            options.temperature,
            sub.forecast,
            logit_positions=None if layout.logit_positions is None else layout.logit_positions.flatten()[sub.positions],
            fp32=options.fp32,
            aux_loss=compute_aux_loss,
            backward=options.backward,
            logits_mib=options.logits_mib,
            entropy=call.compute_entropy,
            entropy_grad=logps_request.entropy_grad,
        )
        pieces.append(sub.in_place(_run(call.model, layout, request, options.runs_sdpa), call.compute_entropy))
        request.stats.layout = layout.name
        stats.append(request.stats)

    back = torch.cat(parts).argsort()
    logps, entropies, aux_losses = zip(*pieces, strict=True)
    return PerTokenLogps(
        logps=torch.cat(logps)[back],
        entropies=torch.cat(entropies)[back] if call.compute_entropy else None,
        aux_loss=torch.stack(aux_losses).mean() if compute_aux_loss else None,
        stats=stats,
    )


def _lay_out(options: LogpsOptions, rows: Rows, share_prompts: bool, compute_aux_loss: bool) -> Layout:
    try:
        if options.layout == "packed":
            return layouts.packed(rows, share_prompts)
        if options.layout == "aligned":
            return layouts.aligned(rows, needs_mask=compute_aux_loss)
    except HolesError as error:
        if options.forced:
            raise ValueError(f"fused_layout={options.layout!r} does not fit this batch: {error}. Use 'auto'.") from None
        logger.warning_once(f"Batches keep the padding of the host where {error}.")
    return Layout("padded", {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask})


def _run(model: nn.Module, layout: Layout, request: FusedRequest, runs_sdpa: bool) -> tuple[Tensor, ...]:
    if layout.name == "padded":
        with cudnn_attention_off():
            results = model(**layout.model_inputs, fused=request)
    else:
        is_packed = layout.name == "packed"
        with watched_call(is_packed) as call:
            # It goes through every layer, as the borders do: a checkpointed one is computed again in backward
            watched = {"watched": call} if is_packed and runs_sdpa else {}
            results = model(**layout.model_inputs, **watched, fused=request)
        if call.reason is not None:
            raise RowsRefusedError(call.reason)
        if is_packed:
            request.check_attention_layers(call.layers)
    return tuple(result.real for result in results)


class _SubBatch:
    """The rows of one sub-batch: which positions they ask for, and where the answers go."""

    def __init__(self, logps_request: LogpsRequest, rows: Tensor):
        mask = logps_request.mask[rows].bool()  # [b, T]
        forecast = logps_request.forecast
        self.shape = mask.shape
        self.fill = None if logps_request.fill is None else logps_request.fill[rows]
        self.forecast, self.zero_grad = None, None
        if forecast is not None:
            needs_grad = mask & forecast.needs_grad[rows]
            if logps_request.skip_zero_grad:
                alive = needs_grad.any(1, keepdim=True)
                self.zero_grad, mask = mask & ~alive, mask & alive
            # Rows without gradient come last: they never enter a backward GEMM
            self.positions, grad_rows = grad_rows_first(mask, needs_grad)  # [N], flat in [b, T]
            width = mask.shape[1]
            in_batch = rows[self.positions // width] * width + self.positions % width  # flat in [B, T]
            self.forecast = forecast.at(in_batch, grad_rows)
        else:
            self.positions, _ = grad_rows_first(mask, None)
        self.scored = mask  # [b, T]

    def in_place(self, results: tuple[Tensor, ...], has_entropies: bool) -> tuple[Tensor | None, ...]:
        """Log-probabilities and entropies at their places `[b, T]`, and the auxiliary loss."""
        values = iter(results)
        logps = self._scatter(next(values), self.fill)
        entropies = None
        if has_entropies:
            rows = next(values)  # [N]
            entropies = self._scatter(rows, None)
            if self.zero_grad is not None:
                # A mean over the mask is then the mean over the sequences that were scored
                entropies = torch.where(self.zero_grad, rows.detach().mean(), entropies)
        return logps, entropies, next(values, None)

    def _scatter(self, rows: Tensor, fill: Tensor | None) -> Tensor:
        base = rows.new_zeros(self.shape) if fill is None else fill.to(rows.dtype)
        return base.flatten().index_put((self.positions,), rows).view(self.shape)
