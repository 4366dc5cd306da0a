"""
Sequences that processes exchange after generation, so that all have about the same work in each forward.

A sequence keeps its micro-batch: the one of the same number on another process. All processes together then have in
every micro-batch what they had before, and the loss, its gradient and TRL's metrics over all processes stay the same.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from trl_fused_grpo.modeling.layout import LayoutName

from .agreement import of_all_processes
from .checks import log_no_effect
from .engine import LogpsEngine
from .exchange_plan import GENERATED_BY, Work, balanced_sources, expected_forwards
from .first_forward import TokenLimits
from .plan import why_not_exchanged


logger = logging.get_logger(__name__)


_PROMPT_FIELDS = {"prompt_ids", "prompt_mask"}  # [B, P], padded left
_COMPLETION_FIELDS = {  # [B, T], padded right
    *("completion_ids", "completion_mask", "tool_mask", "advantages", "importance_sampling_ratio"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
}


def exchanged(
    engine: LogpsEngine,
    batches: list[dict[str, Any]],
    layout: LayoutName,
    windows: list[int],
    limits: Callable[[int], TokenLimits] | None,
    has_images: bool,
) -> list[dict[str, Any]]:
    """
    The micro-batches of a new generation batch after the exchange of sequences between processes, where it is allowed.

    Args:
        engine ([`LogpsEngine`]): knows trainer, options and model.
        batches (`list[dict]`): as TRL has split them.
        layout (`str`): the layout of their rows.
        windows (`list[int]`): see [`window_starts`].
        limits (`Callable`, *optional*): see [`token_limits`]; `None` where micro-batches share no forward.
        has_images (`bool`): whether a micro-batch of any process has images.
    """
    trainer, options = engine.trainer, engine.options
    if options.fused_balance is False:
        return batches
    causal_lm = engine.causal_lm(trainer.model)
    reason = why_not_exchanged(trainer, causal_lm, layout, not options.fused_balance, has_images)
    if reason is not None:
        log_no_effect("fused_balance" if options.fused_balance else None, reason)
        logger.info_once(f"Processes exchange no sequences, because {reason}.")
        return batches
    hidden_size = causal_lm.config.get_text_config().hidden_size
    shares_prompts = engine.shares_prompts(trainer.model)
    limits = limits or (lambda padded: TokenLimits(0, 0))
    return exchanged_sequences(trainer.accelerator, batches, limits, windows, hidden_size, shares_prompts)


def exchanged_sequences(
    accelerator: Any,
    batches: list[dict[str, Any]],
    limits: Callable[[int], TokenLimits],
    windows: list[int],
    hidden_size: int,
    share_prompts: bool,
) -> list[dict[str, Any]]:
    """
    Exchange sequences between processes. All of them call this, each with as many micro-batches of one size.

    Args:
        accelerator (`Accelerator`): its processes, each of which has micro-batches of its own.
        batches (`list[dict]`):
            The micro-batches. They are returned as they are when one of any process holds anything but scalars, which
            are the same everywhere, and tensors with one row for each sequence whose padding is known.
        limits (`Callable`): the tokens that forwards may have, given those of a padded micro-batch.
        windows (`list[int]`): see [`window_starts`].
        hidden_size, share_prompts: see [`Work.of`].

    Returns:
        `list[dict]`: the micro-batches, in the widest padding of any process, with [`GENERATED_BY`]. Those that came in
        when nothing is gained.
    """
    size = len(batches[0]["completion_ids"])
    local = [_signature(batches), *(batches[0][name].shape[1] for name in ("prompt_ids", "completion_ids"))]
    masks = [torch.cat([batch[name] for batch in batches]) for name in ("prompt_mask", "completion_mask")]
    keys = _prompt_keys(torch.cat([batch["prompt_ids"] for batch in batches]), masks[0])
    lengths = torch.stack([mask.sum(1) for mask in masks]).flatten().tolist()
    table = of_all_processes(accelerator, "sequences", [*local, *lengths, *keys])  # [R, 3 + 3 * n]
    signatures, widths = table[:, 0], table[:, 1:3].amax(0).tolist()
    if signatures[0] == 0 or (signatures != signatures[0]).any():
        return batches
    prompt_lengths, lengths, keys = table[:, 3:].chunk(3, dim=1)
    work = Work.of(lengths, prompt_lengths, keys, hidden_size, share_prompts)
    forwards = expected_forwards(work, size, limits(size * sum(widths)), windows)
    sources = balanced_sources(work, size, forwards)
    if (sources == torch.arange(sources.numel()).view_as(sources)).all():
        return batches
    whole = _moved(accelerator, _whole(batches, *widths), sources)
    generated_by = sources[accelerator.process_index] // sources.shape[1]
    whole[GENERATED_BY] = generated_by.to(accelerator.device)
    parts = zip(*(value.split(size) for value in whole.values()), strict=True)
    return [{**batch, **dict(zip(whole, part, strict=True))} for batch, part in zip(batches, parts, strict=True)]


def _prompt_keys(prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
    """A number for each prompt `[n, P]` that is the same on every process. Two prompts with one number cost time."""
    rows = zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)
    return [crc32(ids[mask].numpy().tobytes()) for ids, mask in rows]


def _signature(batches: list[dict[str, Any]]) -> int:
    """A number for what micro-batches hold, the same where their sequences can be exchanged; zero where they cannot."""
    kinds = [_kinds(batch) for batch in batches]
    if any(kind is None or kind != kinds[0] for kind in kinds):
        return 0
    return crc32(repr(kinds[0]).encode()) or 1


def _kinds(batch: dict[str, Any]) -> list[tuple] | None:
    """What each field of a micro-batch is, in the order of their names; `None` where one cannot move."""
    size, widths = len(batch["completion_ids"]), [batch[name].shape[1] for name in ("prompt_ids", "completion_ids")]
    kinds: list[tuple] = []
    for name, value in sorted(batch.items()):
        if not isinstance(value, Tensor) or value.dim() == 0:
            if value is not None and not isinstance(value, (Tensor, bool, int, float, str)):
                return None
            kinds.append((name, value.item() if isinstance(value, Tensor) else value))
            continue
        width = widths[0] if name in _PROMPT_FIELDS else widths[1] if name in _COMPLETION_FIELDS else None
        is_padded = value.dim() == 2 and value.shape[1] == width
        if len(value) != size or value.dim() > 2 or (value.dim() == 2 and not is_padded and value.shape[1] != 1):
            return None
        kinds.append((name, str(value.dtype), value.dim(), is_padded))
    return kinds


def _whole(batches: list[dict[str, Any]], prompt_width: int, completion_width: int) -> dict[str, Tensor]:
    """The sequences of all micro-batches, `[n]` or `[n, W]` for each field, in the widest padding of any process."""
    widths = [batches[0][name].shape[1] for name in ("prompt_ids", "completion_ids")]
    before, behind = prompt_width - widths[0], completion_width - widths[1]
    whole = {}
    for name, first in sorted(batches[0].items()):  # in one order on all processes
        if not isinstance(first, Tensor) or first.dim() == 0:
            continue
        value = torch.cat([batch[name] for batch in batches])
        if name in _PROMPT_FIELDS:
            value = F.pad(value, (before, 0))
        elif name in _COMPLETION_FIELDS and value.dim() == 2 and value.shape[1] == widths[1]:
            value = F.pad(value, (0, behind), value=1 if name == "importance_sampling_ratio" else 0)
        whole[name] = value
    return whole


def _moved(accelerator: Any, whole: dict[str, Tensor], sources: Tensor) -> dict[str, Tensor]:
    """Send sequences to where they belong, see [`balanced_sources`]; all fields of a sequence in one piece."""
    me, (processes, count), device = accelerator.process_index, sources.shape, accelerator.device
    owners, places = sources // count, sources % count
    to_send = [places[to][(owners[to] == me) & (to != me)] for to in range(processes)]
    to_fill = [((owners[me] == other) & (other != me)).nonzero().flatten() for other in range(processes)]
    own = torch.where(owners[me] == me, places[me], torch.arange(count)).to(device)
    fields = [value.unsqueeze(1) if value.dim() == 1 else value for value in whole.values()]
    leaving, filled = torch.cat(to_send).to(device), torch.cat(to_fill).to(device)
    sent = torch.cat([value[leaving].view(torch.uint8) for value in fields], dim=1)
    received = sent.new_empty(len(filled), sent.shape[1])
    dist.all_to_all_single(received, sent, [len(p) for p in to_fill], [len(p) for p in to_send])
    ends = list(accumulate((value.shape[1] * value.element_size() for value in fields), initial=0))
    result = {}
    for (name, value), field, (start, end) in zip(whole.items(), fields, pairwise(ends), strict=True):
        rows = field[own]
        rows[filled] = received[:, start:end].clone(memory_format=torch.contiguous_format).view(field.dtype)
        result[name] = rows.view(len(rows), *value.shape[1:])
    return result
