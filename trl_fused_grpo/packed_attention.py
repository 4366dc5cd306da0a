"""Attention over several sequences packed into one row, for models that take transformers' attention interface."""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


# What torch's `varlen_attn` calls in the end: its wrappers take longer than the kernel at 4000 tokens of a small model
_flash_attention = torch.ops.aten._flash_attention_forward.default


@dataclass
class PackedCall:
    """Counts the attention layers that were called with packed sequences."""

    layers: int = 0


_call: ContextVar[PackedCall | None] = ContextVar("packed_call", default=None)


@contextmanager
def packed_call() -> Generator[PackedCall, None, None]:
    """While it lasts, models build no attention masks: the sequences' borders travel as keyword arguments."""
    install()
    call = PackedCall()
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


def sequence_borders(
    lengths: Sequence[int], key_lengths: Sequence[int], shared: "SharedKeys | None", device: torch.device
) -> dict[str, Any]:
    """
    Keyword arguments that tell attention layers where packed sequences begin, under transformers' names. They pass
    through every layer, so that gradient checkpointing finds them again in backward.

    Args:
        lengths (`Sequence[int]`): tokens of each sequence in the row, `S` in all.
        key_lengths (`Sequence[int]`): tokens that each attends to, itself last, `K` in all.
        shared ([`SharedKeys`], *optional*): where they are. Without it each sequence attends to itself alone.
        device (`torch.device`): of the model's inputs.
    """
    cu_seq_lens = [0, *accumulate(lengths)]
    borders = torch.tensor([cu_seq_lens, [0, *accumulate(key_lengths)]], dtype=torch.int32).to(device)
    return {
        "cu_seq_lens_q": borders[0],
        "cu_seq_lens_k": borders[1],
        "max_length_q": max(lengths),
        "max_length_k": max(key_lengths),
        **({} if shared is None else {"shared_keys": shared}),
    }


class SharedKeys(NamedTuple):
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
    def at(cls, index: Tensor, count: int) -> "SharedKeys":
        """From the positions `[K]` in a row of `count` tokens, each of which occurs."""
        positions, copies = index.sort(stable=True)
        starts = torch.searchsorted(positions, torch.arange(count + 1, device=index.device))
        return cls(index, copies, starts)


class _Repeated(torch.autograd.Function):
    """Keys and values `[S, heads, D]` as each sequence sees them `[K, heads, D]`; copies add up their gradients."""

    @staticmethod
    def forward(ctx, keys: Tensor, values: Tensor, shared: SharedKeys) -> tuple[Tensor, Tensor]:
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


@functools.cache
def install() -> None:
    """
    Let transformers' `"sdpa"` attention honour sequence borders where they are given. Without them it is what it was.
    """
    attention, mask = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", _with_borders(attention))
    AttentionMaskInterface.register("sdpa", _without_mask_when_packed(mask))


def _with_borders(original: Callable) -> Callable:
    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        if kwargs.get("cu_seq_lens_q") is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        call = _call.get()
        if call is not None:
            call.layers += 1
        return _packed_attention(module, query, key, value, **kwargs), None

    return attention


def _without_mask_when_packed(original: Callable) -> Callable:
    @functools.wraps(original)
    def mask(*args, **kwargs):
        return original(*args, **kwargs) if _call.get() is None else None

    return mask


def _packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D]
    cu_seq_lens_q: Tensor,  # [sequences + 1]
    cu_seq_lens_k: Tensor,  # [sequences + 1]
    max_length_q: int,
    max_length_k: int,
    shared_keys: SharedKeys | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_,
) -> Tensor:
    """Causal attention of each sequence to its keys, the last of which is its own last; returns `[1, S, heads, D]`."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # As autocast does for SDPA: under float32 weights, norms and rotations leave float32 queries and keys
        query, key, value = (t.to(torch.get_autocast_dtype(device_type)) for t in (query, key, value))
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [S, heads, D]
    if shared_keys is not None:
        keys, values = _Repeated.apply(keys, values, shared_keys)  # [K, key heads, D]
    if _flash_takes(query, value):
        # FlashAttention counts the tokens left of the query, transformers the query too
        left = None if sliding_window is None else sliding_window - 1
        output, *_ = _flash_attention(
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

    pieces = []
    lengths, key_lengths = cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist()
    parts = queries.split(lengths), keys.split(key_lengths), values.split(key_lengths)
    for q, k, v in zip(*([t.transpose(0, 1).unsqueeze(0) for t in part] for part in parts), strict=True):
        masked = q.shape[2] < k.shape[2] or (sliding_window is not None and k.shape[2] > sliding_window)
        mask = _causal_window(q.shape[2], k.shape[2], sliding_window, q.device) if masked else None
        piece = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        pieces.append(piece.transpose(1, 2))  # [1, s, heads, D]
    return torch.cat(pieces, dim=1)


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
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


def _causal_window(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which of its `keys` each of the last `length` tokens of a sequence attends to `[length, keys]`."""
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (keys if window is None else window))
