"""Attention over several sequences packed into one row, for models that take transformers' attention interface."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

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


def sequence_borders(lengths: Tensor) -> dict[str, Tensor | int]:
    """
    Keyword arguments that tell attention layers where packed sequences begin, under transformers' names. They pass
    through every layer, so that gradient checkpointing finds them again in backward.

    Args:
        lengths (`Tensor`): tokens of each sequence `[S]`.
    """
    cu_seq_lens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))  # [S + 1]
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


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
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_,
) -> Tensor:
    """Causal attention within each sequence; returns `[1, S, heads, D]`."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # As autocast does for SDPA: under float32 weights, norms and rotations leave float32 queries and keys
        query, key, value = (t.to(torch.get_autocast_dtype(device_type)) for t in (query, key, value))
    if _flash_takes(query, value):
        rows = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]  # [S, heads, D]
        borders = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        # FlashAttention counts the tokens left of the query, transformers the query too
        left = None if sliding_window is None else sliding_window - 1
        output, *_ = _flash_attention(
            *rows,
            *borders,
            dropout_p=0.0,
            is_causal=left is None,
            return_debug_mask=False,
            scale=scaling,
            window_size_left=left,
            window_size_right=None if left is None else 0,
        )
        return output.unsqueeze(0)

    pieces = []
    lengths = cu_seq_lens_q.diff().tolist()
    for q, k, v in zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True):
        windowed = sliding_window is not None and q.shape[2] > sliding_window
        mask = _causal_window(q.shape[2], sliding_window, q.device) if windowed else None
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


def _causal_window(length: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)  # [s, s]
