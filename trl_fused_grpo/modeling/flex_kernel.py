"""Soft-capped attention scores on CUDA: torch's flex attention, compiled once, with a mask by sequence and window."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo._compat import torch as torch_compat

from .attention_kernels import Boundaries


_BLOCK = 128


def why_no_flex(query: Tensor, value: Tensor) -> str | None:
    """Why flex attention cannot stand in for a model's own function, or `None`."""
    width = query.shape[-1]
    if torch_compat.flex_attention is None:
        return "this torch has no flex attention with masks from blocks"
    if width != value.shape[-1] or width < 16 or width & (width - 1):
        return f"flex attention takes no heads of {width} and {value.shape[-1]}"
    return None


def flex_attention(
    queries: Tensor,  # [S, heads, D]
    keys: Tensor,  # [K, key heads, D]
    values: Tensor,  # [K, key heads, D]
    block_mask: Any,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
    attention: Callable | None = None,
) -> Tensor:
    """
    Attention of each sequence to its own keys, its scores capped by `softcap * tanh(score / softcap)`, with or without
    sinks.

    Args:
        block_mask: from [`build_block_mask`].
        attention (`Callable`, *optional*): torch's function, by default compiled.

    Returns:
        `Tensor`: `[S, heads, D]`.
    """
    attention = attention or _compiled()
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (queries, keys, values))  # [1, heads, S or K, D]
    options: dict[str, Any] = {"block_mask": block_mask, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if softcap is not None:
        options["score_mod"] = _soft_cap(softcap)
    if sinks is None:
        return attention(q, k, v, **options).squeeze(0).transpose(0, 1)
    output, lse = torch_compat.with_lse(attention(q, k, v, **options, **torch_compat.FLEX_LSE))  # lse: [1, heads, S]
    factor = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1)
    return (output * factor).to(output.dtype).squeeze(0).transpose(0, 1)


@functools.cache
def _compiled() -> Callable:
    return torch.compile(torch_compat.flex_attention, dynamic=True)


@functools.cache
def _soft_cap(softcap: float) -> Callable:
    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    return capped


def build_block_mask(boundaries: Boundaries, queries: int, keys: int, window: int | None) -> Any:
    """
    The mask under which each of `queries` tokens sees the `keys` of its own sequence up to itself, within a window.

    It is built from ranges of blocks, because a mask of all pairs would take more memory than the activations.

    Args:
        boundaries ([`Boundaries`]): of the sequences.
        queries, keys (`int`): `S` and `K`.
        window (`int`, *optional*): in tokens, the token itself among them.
    """
    cu_q, cu_k = boundaries.cu_seq_lens_q.long(), boundaries.cu_seq_lens_k.long()
    token = torch.arange(queries, device=cu_q.device)
    sequence = torch.searchsorted(cu_q, token, right=True) - 1
    last = cu_k[sequence + 1] - (cu_q[sequence + 1] - token)  # [S], the key of the token itself
    first = cu_k[sequence]  # [S]
    if window is not None:
        first = torch.maximum(first, last - window + 1)

    def sees(batch, head, query, key):
        return (key >= first[query]) & (key <= last[query])

    block = torch.arange(-(-keys // _BLOCK), device=cu_q.device)  # [key blocks]
    lowest, highest = (_extreme(first, keys, "amin"), _extreme(last, -1, "amax"))  # [query blocks]
    within = (block >= lowest // _BLOCK) & (block <= highest // _BLOCK)  # [query blocks, key blocks]
    # Every token of the query's block sees every key of these
    whole_from, whole_to = _extreme(first, -1, "amax"), _extreme(last, keys, "amin")
    whole = (block * _BLOCK >= whole_from) & (block * _BLOCK + _BLOCK - 1 <= whole_to)
    partly = _ordered(within & ~whole)
    return torch_compat.BlockMask.from_kv_blocks(
        *partly, *_ordered(whole), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _extreme(values: Tensor, neutral: int, kind: str) -> Tensor:
    """The lowest or highest of `values` `[S]` in each block of queries `[query blocks, 1]`."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK), value=neutral)
    return getattr(padded.view(-1, _BLOCK), kind)(1, keepdim=True)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """From which key blocks `[query blocks, key blocks]`: their number, and their indices before all others."""
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1, dtype=torch.int32)[None, None], indices[None, None]
