"""Soft-capped attention scores on CUDA: torch's flex attention, compiled once, with a mask by sequence and window."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo._compat import torch as torch_compat

from .kernels import Boundaries, own_keys


_BLOCK = 128


def why_no_flex(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float) -> str | None:
    """Why flex attention cannot stand in for a model's own function, or `None`. It is tried out once, on few tokens."""
    width = query.shape[-1]
    if torch_compat.flex_attention is None:
        return "flex attention needs torch 2.9 or later"
    if width != value.shape[-1] or width < 16 or width & (width - 1):
        return f"flex attention takes no heads of {width} and {value.shape[-1]}"
    heads = query.shape[1], key.shape[1]
    return _why_not_compiled(*heads, width, query.dtype, query.device, scaling, softcap)


@functools.cache
def _why_not_compiled(
    heads: int,
    key_heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    scaling: float | None,
    softcap: float,
) -> str | None:
    # Not a tensor of the trial is to be saved by the hooks of a checkpointed layer around
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    count = 2 * _BLOCK + 1  # neither a multiple of a block nor a number that torch compiles for alone
    try:
        with torch.enable_grad(), no_hooks:
            q, k, v = (
                torch.zeros(count, n, width, dtype=dtype, device=device, requires_grad=True)
                for n in (heads, key_heads, key_heads)
            )
            cu_seqlens = torch.tensor([0, count], dtype=torch.int32, device=device)
            block_mask = build_block_mask(Boundaries(cu_seqlens, cu_seqlens, count, count), count, count, None)
            flex_attention(q, k, v, block_mask, scaling, softcap).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of torch's compiler, of Triton or of the C compiler that these call
        message = " ".join(str(error).split())[:1000]  # the compiler's begin with what it saw
        return f"torch cannot compile flex attention here ({type(error).__name__}: {message})"
    return None


def flex_attention(
    queries: Tensor,  # [S, heads, D]
    keys: Tensor,  # [K, key heads, D]
    values: Tensor,  # [K, key heads, D]
    block_mask: Any,  # from [`build_block_mask`]
    scaling: float | None,
    softcap: float,
    attention: Callable | None = None,  # [`not_compiled`] or the like, by default compiled
) -> Tensor:
    """
    Attention of each sequence to its own keys, its scores capped by `softcap * tanh(score / softcap)`.

    Returns:
        `Tensor`: `[S, heads, D]`.
    """
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (queries, keys, values))  # [1, heads, S or K, D]
    scale = repr(float(q.shape[-1] ** -0.5 if scaling is None else scaling))
    options: dict[str, Any] = {"scale": scale, "block_mask": block_mask, "enable_gqa": q.shape[1] != k.shape[1]}
    attention = attention or _compiled(*_kind(q, k), scale, softcap)
    return attention(q, k, v, score_mod=_soft_cap(repr(float(softcap))), **options).squeeze(0).transpose(0, 1)


def not_compiled(query: Tensor, key: Tensor, value: Tensor, *, scale: str, **options: Any) -> Any:
    """
    Torch's function, its scale given as a text.

    The compiler takes a number for a variable of the graph, which the kernel cannot have. It takes a text for a
    constant, and the number in it too.
    """
    return torch_compat.flex_attention(query, key, value, scale=float(scale), **options)


@functools.cache
def _compiled(*kind: Any) -> Callable:
    """[`not_compiled`], compiled for one kind of call: the compiler gives up a function that it met in many kinds."""
    function = types.FunctionType(not_compiled.__code__.replace(co_name="flex_attention"), globals())
    # With a graph break it would run uncompiled, with all scores in memory
    return torch.compile(function, dynamic=True, fullgraph=True)


def _kind(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """What the compiler looks at in queries and keys, beyond their lengths: whether these are equal, or one block."""
    counts = query.shape[2], key.shape[2]
    lengths = counts[0] == counts[1], *(count > _BLOCK for count in counts)
    return query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device, torch.is_grad_enabled(), lengths


@functools.cache
def _soft_cap(softcap: str) -> Callable:
    def capped(score, batch, head, query, key):
        cap = float(softcap)
        return cap * torch.tanh(score / cap)

    return capped


def build_block_mask(boundaries: Boundaries, queries: int, keys: int, window: int | None) -> Any:
    """
    The mask under which each of `queries` tokens sees the `keys` of its own sequence up to itself, within a window.

    It is built from ranges of blocks, because a mask of all pairs would take more memory than the activations.
    """
    last = own_keys(boundaries, queries)  # [S]
    cu_k = boundaries.cu_seq_lens_k.long()
    first = cu_k[torch.searchsorted(cu_k, last, right=True) - 1]  # [S]
    if window is not None:
        first = torch.maximum(first, last - window + 1)

    def sees(batch, head, query, key):
        return (key >= first[query]) & (key <= last[query])

    block = torch.arange(-(-keys // _BLOCK), device=cu_k.device)  # [key blocks]
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
