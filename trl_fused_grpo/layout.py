"""How the rows of a micro-batch are laid out for the model: packed, aligned, or as the host hands them over."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from . import _trl_compat as compat
from .packed_attention import SharedKeys, sequence_borders


logger = logging.get_logger(__name__)

LayoutName = Literal["packed", "aligned", "host"]
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_HASH_BASE = 6364136223846793005  # any odd number of 64 bits
_SINKS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """
    What the model is called with, and where the predictions are found.

    Args:
        name (`str`): `"packed"`, `"aligned"` or `"host"`.
        model_inputs (`dict`): keyword arguments of the model.
        predictors (`Tensor`, *optional*):
            `[B, T]`: flat position, in the hidden states, of the token before each completion token. `None` for the
            host's layout, whose last `T + 1` columns end the row.
    """

    name: LayoutName
    model_inputs: dict[str, Any]
    predictors: Tensor | None = None


def why_not_aligned(model: nn.Module, is_multimodal: bool, reads_padding: bool) -> str | None:
    """Why rows may not be shifted and cut, or `None`."""
    if is_multimodal:
        return "its inputs are multimodal"
    if reads_padding:
        return "TRL's LUSPO of this version reads padding"
    causal_lm = compat.without_adapter(model)
    if compat.is_prompt_learning(model):
        return "a prompt-learning adapter puts virtual tokens before the row"
    if causal_lm.config.get_text_config() is not causal_lm.config:
        return "it is a composite model"
    if causal_lm.config.model_type in compat.PADDING_MATTERS:
        return "its own results depend on the padding"
    if not _takes_position_ids(type(compat.backbone(causal_lm))):
        return "it takes no position_ids"
    return None


def why_not_packed(causal_lm: PreTrainedModel) -> str | None:
    """Why rows that may be aligned may not share one row, or `None`."""
    config = causal_lm.config
    if not getattr(causal_lm, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    if config._attn_implementation not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        return f"attn_implementation={config._attn_implementation!r} knows no sequence borders"
    if (
        getattr(causal_lm, "_is_stateful", False)
        or not set(getattr(config, "layer_types", None) or ()) <= ATTENTION_LAYERS
    ):
        return "it has layers that carry a state from token to token"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped"
    if _has_sinks(causal_lm):
        return "its attention has sinks"
    if getattr(config, "attention_dropout", 0.0) and causal_lm.training:
        return "it drops out attention"
    return None


def keys_may_repeat(causal_lm: PreTrainedModel) -> bool:
    """Whether sequences of a packed row may attend to a prompt before another: torch's attention is called here."""
    return causal_lm.config._attn_implementation == "sdpa"


def choose(
    wanted: str,
    model: nn.Module,
    causal_lm: PreTrainedModel,
    is_multimodal: bool,
    reads_padding: bool,
    borders_ignored: bool,
) -> LayoutName:
    """
    The layout that is wanted, or with `"auto"` the first of packed, aligned and host that a model allows.

    Args:
        wanted (`str`): a layout's name or `"auto"`.
        model (`nn.Module`): in no wrapper but PEFT's.
        causal_lm (`PreTrainedModel`): the causal language model in it.
        is_multimodal, reads_padding (`bool`): whether its inputs are, and whether its objective does.
        borders_ignored (`bool`): whether it was found to run over packed sequences as if they were one.

    Raises:
        `ValueError`: when the one wanted is not allowed, with the reason.
    """
    reasons = {"aligned": why_not_aligned(model, is_multimodal, reads_padding), "host": None}
    reasons["packed"] = reasons["aligned"] or why_not_packed(causal_lm)
    if borders_ignored:
        reasons["packed"] = "its attention ignores the borders of packed sequences"
    if wanted != "auto" and reasons[wanted] is not None:
        raise ValueError(f"fused_layout={wanted!r} does not fit this model: {reasons[wanted]}. Use 'auto'.")
    names: tuple[LayoutName, ...] = ("packed", "aligned", "host")
    name = next(name for name in names if name == wanted or (wanted == "auto" and reasons[name] is None))
    if name == "host" and wanted == "auto":
        logger.warning_once(f"Rows keep the padding of the host, because {reasons['aligned']}.")
    return name


@functools.cache
def _takes_position_ids(backbone: Any) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _has_sinks(causal_lm: PreTrainedModel) -> bool:
    if causal_lm not in _SINKS:  # a walk over all modules takes as long as a layer
        _SINKS[causal_lm] = any(hasattr(module, "sinks") for module in causal_lm.modules())
    return _SINKS[causal_lm]


def packed(
    input_ids: Tensor, attention_mask: Tensor, completion_length: int, wanted: Tensor, share_prompts: bool
) -> Layout:
    """
    The micro-batch as one row without padding, each sequence where it starts.

    Args:
        input_ids, attention_mask (`Tensor`): `[B, P + T]`, prompts padded left and completions right.
        completion_length (`int`): `T`.
        wanted (`Tensor`): sequences that are scored at all `[B]`, bool; the others are left out.
        share_prompts (`bool`):
            Whether a prompt stands in the row once, before the first of its completions. The others attend to it there.
    """
    size, width = input_ids.shape
    start = width - completion_length
    rows = torch.arange(size, device=input_ids.device)
    wanted = wanted | (rows == 0) & ~wanted.any()  # never an empty row
    mask = attention_mask.bool() & wanted.unsqueeze(1)  # [B, L]
    kept, owner = mask, rows
    if share_prompts and size > 1:
        owner = _first_with_the_prompt(input_ids[:, :start], mask[:, :start], mask[:, start:].any(1))  # [B]
        kept = mask & ((owner == rows).unsqueeze(1) | (torch.arange(width, device=rows.device) >= start))
    # The one time that the device is waited for
    lengths, key_lengths = torch.stack([kept.sum(1), mask.sum(1)]).tolist()
    place = _running_number(kept)  # [B, L], position of each token in the packed row
    index = _where(kept, place, sum(lengths))  # [S]
    # Where to find the tokens that each sequence sees, its prompt with the prompt's owner
    seen_at = torch.cat([place[owner, :start], place[:, start:]], dim=1)  # [B, L]
    shared = None
    if lengths != key_lengths:
        keys = _where(mask, _running_number(mask), sum(key_lengths))  # [K]
        shared = SharedKeys.at(seen_at.flatten()[keys], len(index))
    key_lengths = [keys for length, keys in zip(lengths, key_lengths, strict=True) if length]
    borders = sequence_borders([length for length in lengths if length], key_lengths, shared, input_ids.device)
    model_inputs = {
        "input_ids": input_ids.flatten()[index].unsqueeze(0),
        # The host's own columns: the same distances for rotary models, the same positions for absolute ones
        "position_ids": (index % width).unsqueeze(0),
        **borders,
    }
    first = seen_at[:, start - 1 : start] if start else place[:, :1] - 1
    return Layout("packed", model_inputs, torch.cat([first, place[:, start:-1]], dim=1))


def _first_with_the_prompt(prompt_ids: Tensor, prompt_mask: Tensor, has_completion: Tensor) -> Tensor:
    """The first sequence with the prompt of each `[B]`: itself if there is none before, or if it ends in its prompt."""
    prompts = prompt_ids.masked_fill(~prompt_mask, -1)  # [B, P]
    # A polynomial of the token ids, modulo 2^64, finds candidates; what counts is whether they are the same
    powers = torch.full_like(prompts[0], _HASH_BASE).cumprod(0)
    hashes = (prompts * powers).sum(1)  # [B]
    first = (hashes.unsqueeze(1) == hashes).byte().argmax(1)
    rows = torch.arange(len(prompts), device=prompts.device)
    return torch.where(has_completion & (prompts[first] == prompts).all(1), first, rows)


def _running_number(mask: Tensor) -> Tensor:
    """Number of the last true entry up to each, counted row by row `[B, L]`; -1 before the first."""
    return mask.flatten().cumsum(0).view_as(mask) - 1


def _where(mask: Tensor, number: Tensor, count: int) -> Tensor:
    """Flat positions of the `count` true entries `[count]`, from their running `number`: no wait for the device."""
    places = torch.where(mask, number, count).flatten()
    index = torch.empty(count + 1, dtype=torch.long, device=mask.device)
    return index.scatter_(0, places, torch.arange(len(places), device=mask.device))[:count]


def aligned(input_ids: Tensor, attention_mask: Tensor, completion_length: int, needs_mask: bool) -> Layout:
    """
    Rows shifted left and cut to the longest. Padding on the right needs no mask under causal attention.

    Args:
        input_ids, attention_mask (`Tensor`): `[B, P + T]`, prompts padded left and completions right.
        completion_length (`int`): `T`.
        needs_mask (`bool`): whether the model wants a mask all the same.
    """
    width = max(int(attention_mask.sum(1).max()), 1)
    order = attention_mask.sort(dim=1, descending=True, stable=True)
    columns = order.indices[:, :width]  # [B, W]
    # Positions run on over the padding: where they jump, transformers sees another sequence and builds a mask
    onward = columns[:, :1] + torch.arange(width, device=columns.device)
    position_ids = torch.where(order.values[:, :width].bool(), columns, onward)
    model_inputs = {"input_ids": input_ids.gather(1, columns), "position_ids": position_ids}
    if needs_mask:
        model_inputs["attention_mask"] = order.values[:, :width]
    row = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
    place = attention_mask.cumsum(1)[:, -completion_length:] - 1  # [B, T]
    return Layout("aligned", model_inputs, row * width + place - 1)
