"""Packed rows in models that load with transformers' `"eager"` attention, of which each modeling file has its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .varlen_attention import causal_mask, gathered_keys


_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "shared_prefix_kv")


def eager_attention(
    original: Callable,
    module: nn.Module,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D]
    options: dict[str, Any],
    window: int | None,
    mask_dtype: torch.dtype | None,
) -> Tensor:
    """
    A model's own attention function over packed sequences.

    Args:
        original (`Callable`): the function of the modeling file.
        module (`nn.Module`): the attention layer.
        options (`dict`): keyword arguments of the call, those of [`cu_seqlens_arguments`] among them.
        window (`int`, *optional*): the sliding window of this layer's mask, in tokens.
        mask_dtype (`torch.dtype`, *optional*): of the masks that the model asked for; by default that of the query.

    Returns:
        `Tensor`: `[1, S, heads, D]`.
    """
    key, value = gathered_keys(key, value, options.get("shared_prefix_kv"))
    lengths, key_lengths = (options[name].diff().tolist() for name in _BOUNDARIES[:2])
    own = {name: option for name, option in options.items() if name not in _BOUNDARIES}
    parts = query.split(lengths, dim=2), key.split(key_lengths, dim=2), value.split(key_lengths, dim=2)
    dtype = mask_dtype or query.dtype
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        mask = _additive(causal_mask(q.shape[2], k.shape[2], window, q.device), dtype)
        outputs.append(original(module, q, k, v, mask, **own)[0])
    return torch.cat(outputs, dim=1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask `[s, k]` as transformers gives it to eager attention `[1, 1, s, k]`: 0 or the lowest number."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)[None, None]
