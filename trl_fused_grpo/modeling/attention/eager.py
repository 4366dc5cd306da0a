"""Packed rows in models that load with transformers' `"eager"` attention, of which each modeling file has its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .eager_formula import EagerFormula, additive_mask, eager_formula, sinks_of
from .flex import build_block_mask, flex_attention, why_no_flex
from .kernels import Boundaries, autocast_dtype, flash_takes, kernels_take
from .sinks import sink_attention
from .varlen import by_token, causal_mask, gathered_keys, varlen_attention
from .watch import PACKED_ARGUMENTS


logger = logging.get_logger(__name__)


class EagerLayer(NamedTuple):
    """One call of an attention layer."""

    original: Callable  # the attention function of its modeling file
    module: nn.Module
    options: dict[str, Any]  # keyword arguments of the call, those of [`cu_seqlens_arguments`] among them
    window: int | None  # the sliding window of the layer's mask, in tokens
    mask_dtype: torch.dtype | None  # of the masks that the model asked for; by default that of the query
    memo: dict[Any, Any]  # what all layers of a forward have in common

    @property
    def own_options(self) -> dict[str, Any]:
        """The keyword arguments that the model gives to its attention function in padded rows too."""
        return {name: option for name, option in self.options.items() if name not in PACKED_ARGUMENTS}

    @property
    def boundaries(self) -> Boundaries:
        """Where the sequences begin."""
        return Boundaries(*(self.options[name] for name in Boundaries._fields))


def eager_attention(
    layer: EagerLayer,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D of values]
) -> Tensor:
    """
    A model's own attention function over packed sequences: a kernel of the same formula in half precision on CUDA, and
    else the function itself, for one sequence after the other.

    Returns:
        `Tensor`: `[1, S, heads, D of values]`.
    """
    q, k, v = (tensor.to(autocast_dtype(tensor)) for tensor in (query, key, value))
    formula = eager_formula(layer.original, layer.module, layer.own_options) if _is_fast(q) else None
    if formula == EagerFormula(caps=False, has_sinks=False):
        options: dict[str, Any] = {**layer.options, "sliding_window": layer.window}
        return varlen_attention(layer.module, q, k, v, **options)
    if formula == EagerFormula(caps=False, has_sinks=True) and flash_takes(q, v):
        return _with_sinks(layer, q, k, v)
    if formula == EagerFormula(caps=True, has_sinks=False):
        reason = why_no_flex(q, k, v, layer.options["scaling"], layer.options["softcap"])
        if reason is None:
            return _with_flex(layer, q, k, v)
        logger.warning_once(f"Attention runs for one sequence after the other, because {reason}.")
    return _sequence_by_sequence(layer, query, key, value)


def _is_fast(query: Tensor) -> bool:
    return kernels_take(query) and query.dtype != torch.float32


def _with_sinks(layer: EagerLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = gathered_keys(key, value, layer.options.get("shared_prefix_kv"))
    sinks: Any = sinks_of(layer.module, layer.options)
    arguments = sinks, layer.boundaries, layer.options["scaling"], layer.window
    return sink_attention(*by_token(query, key, value), *arguments).unsqueeze(0)


def _with_flex(layer: EagerLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = gathered_keys(key, value, layer.options.get("shared_prefix_kv"))
    boundaries = layer.boundaries
    made_for, block_mask = layer.memo.get(("flex", layer.window), (None, None))
    if made_for is not boundaries.cu_seq_lens_q:  # a layer of the same kind has not been here
        block_mask = build_block_mask(boundaries, query.shape[2], key.shape[2], layer.window)
        layer.memo["flex", layer.window] = boundaries.cu_seq_lens_q, block_mask
    arguments = block_mask, layer.options["scaling"], layer.options["softcap"]
    return flex_attention(*by_token(query, key, value), *arguments).unsqueeze(0)


def _sequence_by_sequence(layer: EagerLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = gathered_keys(key, value, layer.options.get("shared_prefix_kv"))
    lengths, key_lengths = (cu_seqlens.diff().tolist() for cu_seqlens in layer.boundaries[:2])
    parts = query.split(lengths, dim=2), key.split(key_lengths, dim=2), value.split(key_lengths, dim=2)
    dtype = layer.mask_dtype or query.dtype
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        mask = additive_mask(causal_mask(q.shape[2], k.shape[2], layer.window, q.device), dtype)
        outputs.append(layer.original(layer.module, q, k, v, mask, **layer.own_options)[0])
    return torch.cat(outputs, dim=1)
