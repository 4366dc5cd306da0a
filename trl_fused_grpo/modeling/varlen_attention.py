"""Attention over several sequences that are packed into one row, each of which attends to itself alone."""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trl_fused_grpo._compat import torch as torch_compat


_torch_sdpa = F.scaled_dot_product_attention


def cu_seqlens_arguments(
    lengths: Sequence[int], key_lengths: Sequence[int], shared: "SharedPrefixKV | None", device: torch.device
) -> dict[str, Any]:
    """
    Keyword arguments that tell attention layers where packed sequences begin, under transformers' names. They go
    through every layer, so that gradient checkpointing finds them again in backward.

    Args:
        lengths (`Sequence[int]`): tokens of each sequence in the row, `S` in all.
        key_lengths (`Sequence[int]`): tokens that each attends to, its own last, `K` in all.
        shared ([`SharedPrefixKV`], *optional*): where those are. Without it each sequence attends to itself alone.
        device (`torch.device`): of the model's inputs.
    """
    cu_seqlens = torch.tensor([[0, *accumulate(lengths)], [0, *accumulate(key_lengths)]], dtype=torch.int32).to(device)
    return {
        "cu_seq_lens_q": cu_seqlens[0],
        "cu_seq_lens_k": cu_seqlens[1],
        "max_length_q": max(lengths),
        "max_length_k": max(key_lengths),
        **({} if shared is None else {"shared_prefix_kv": shared}),
    }


class SharedPrefixKV(NamedTuple):
    """
    Where the keys of each sequence are, when several attend to the same ones.

    Args:
        index (`Tensor`): `[K]`: position in the row of `S` tokens.
        copies (`Tensor`): `[K]`: for each position in turn, where in `index` it stands.
        starts (`Tensor`): `[S + 1]`: where in `copies` each position begins.
    """

    index: Tensor
    copies: Tensor
    starts: Tensor

    @classmethod
    def at(cls, index: Tensor, count: int) -> "SharedPrefixKV":
        """From the positions `[K]` in a row of `count` tokens, each of which occurs."""
        positions, copies = index.sort(stable=True)
        starts = torch.searchsorted(positions, torch.arange(count + 1, device=index.device))
        return cls(index, copies, starts)


class _GatherKV(torch.autograd.Function):
    """Keys and values `[S, heads, D]` as each sequence sees them `[K, heads, D]`; copies add up their gradients."""

    @staticmethod
    def forward(ctx, keys: Tensor, values: Tensor, shared: SharedPrefixKV) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(shared.copies, shared.starts)
        return keys.index_select(0, shared.index), values.index_select(0, shared.index)

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor, Tensor, None]:
        copies, starts = ctx.saved_tensors

        def total(grad: Tensor) -> Tensor:
            # Sums of rows, accumulated in float32 on CUDA
            rows, *_ = torch.embedding_bag(grad.flatten(1), copies, starts, mode=0, include_last_offset=True)
            return rows.unflatten(1, grad.shape[1:])

        grad_keys, grad_values = grads
        return total(grad_keys), total(grad_values), None


def gathered_keys(key: Tensor, value: Tensor, shared: SharedPrefixKV | None) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, key heads, S, D]` as each sequence sees them `[1, key heads, K, D]`."""
    if shared is None:
        return key, value
    keys, values = _GatherKV.apply(*(t.squeeze(0).transpose(0, 1) for t in (key, value)), shared)
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def varlen_attention(
    module: nn.Module | None,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D]
    cu_seq_lens_q: Tensor,  # [sequences + 1]
    cu_seq_lens_k: Tensor,  # [sequences + 1]
    max_length_q: int,
    max_length_k: int,
    shared_prefix_kv: SharedPrefixKV | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_,
) -> Tensor:
    """
    Causal attention of each sequence to its own keys.

    A sequence may have more keys than queries: its last query then stands at its last key. The arguments are those of
    transformers' attention functions, and [`cu_seqlens_arguments`].

    Returns:
        `Tensor`: `[1, S, heads, D]`.
    """
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # As autocast does for SDPA: under float32 weights, norms and rotations leave float32 queries and keys
        query, key, value = (t.to(torch.get_autocast_dtype(device_type)) for t in (query, key, value))
    key, value = gathered_keys(key, value, shared_prefix_kv)
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [S or K, heads, D]
    if not _flash_takes(query, value):
        lengths, key_lengths = cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist()
        parts = queries.split(lengths), keys.split(key_lengths), values.split(key_lengths)
        return torch.cat([_one_sequence(*part, scaling, sliding_window) for part in zip(*parts, strict=True)], dim=1)
    # FlashAttention counts the tokens left of the query, transformers the query too
    left = None if sliding_window is None else sliding_window - 1
    output, *_ = torch_compat.flash_attention(
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        dropout_p=0.0,
        is_causal=left is None,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=left,
        window_size_right=None if left is None else 0,
    )
    return output.unsqueeze(0)


def _one_sequence(
    queries: Tensor,  # [s, heads, D]
    keys: Tensor,  # [k, key heads, D]
    values: Tensor,  # [k, key heads, D]
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attention of one sequence through torch's SDPA; returns `[1, s, heads, D]`."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (queries, keys, values))  # [1, heads, s or k, D]
    needs_mask = q.shape[2] < k.shape[2] or (sliding_window is not None and k.shape[2] > sliding_window)
    mask = causal_mask(q.shape[2], k.shape[2], sliding_window, q.device) if needs_mask else None
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and F.scaled_dot_product_attention is _torch_sdpa  # whoever replaces it wants it called
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= _widest_head(query.device)
    )


@functools.cache
def _widest_head(device: torch.device) -> int:
    """The widest head that torch's FlashAttention takes on a device, backward included; 0 where there is none."""
    if not torch.backends.cuda.is_flash_attention_available():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    # Backward needs the shared memory of the data center's chips above 192
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192


def causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which of its `keys` each of the last `length` tokens of a sequence attends to `[length, keys]`."""
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (keys if window is None else window))
