"""Torch's own attention kernels over several sequences in a row, and which tensors they take."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_fused_grpo._compat import torch as torch_compat


_HALF = (torch.float16, torch.bfloat16)
_torch_sdpa = F.scaled_dot_product_attention


class Boundaries(NamedTuple):
    """
    Where sequences begin, under transformers' names.

    Args:
        cu_seq_lens_q, cu_seq_lens_k (`Tensor`):
            `[sequences + 1]`, int32: where the queries and the keys of each sequence begin.
        max_length_q, max_length_k (`int`): of the longest sequence.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


class FlashCall(NamedTuple):
    """
    FlashAttention over sequences: causal, the last query of each at its last key.

    Args:
        boundaries ([`Boundaries`]): of the sequences.
        scaling (`float`, *optional*): of the scores.
        window (`int`, *optional*): the sliding window, in tokens.
    """

    boundaries: Boundaries
    scaling: float | None
    window: int | None

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Any:
        """From `[S, heads, D]` and `[K, key heads, D]`: output, log-sum-exp, two random states, a debug mask."""
        return torch_compat.flash_attention(
            queries, keys, values, *self.boundaries, 0.0, self.window is None, False, **self._options()
        )

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; `saved` are these, output, log-sum-exp and two random states."""
        *tensors, state, unused = saved
        return torch_compat.flash_attention_backward(
            grad, *tensors, *self.boundaries, 0.0, self.window is None, state, unused, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        # FlashAttention counts the tokens left of the query, transformers the query too
        left, right = (None, None) if self.window is None else (self.window - 1, 0)
        return {"scale": self.scaling, "window_size_left": left, "window_size_right": right}


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as autocast has them for SDPA: under float32 weights, norms and rotations leave float32 queries."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors)


def kernels_take(query: Tensor) -> bool:
    """Whether torch's fused kernels may be called directly for tensors like a `query`."""
    # Whoever replaces SDPA wants it called
    return query.is_cuda and F.scaled_dot_product_attention is _torch_sdpa and query.dtype in (*_HALF, torch.float32)


def flash_takes(query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention takes tensors of these widths, with zeros behind the narrower ones."""
    return kernels_take(query) and query.dtype in _HALF and _common_width(query, value) <= _widest_head(query.device)


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


def _common_width(query: Tensor, value: Tensor) -> int:
    """A width of heads that FlashAttention knows: that of the widest, a multiple of 8."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def of_one_width(
    attention: Callable[..., Tensor], queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """
    Call `attention(queries, keys, values, scaling)` with zeros behind the narrower heads, which add nothing to scores
    nor output.

    Returns:
        `Tensor`: `[S, heads, width of values]`.
    """
    width, value_width = _common_width(queries, values), values.shape[-1]
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    widened = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (queries, keys, values))
    return attention(*widened, scaling)[..., :value_width]


def flash_attention(
    queries: Tensor,  # [S, heads, D]
    keys: Tensor,  # [K, key heads, D]
    values: Tensor,  # [K, key heads, D of values]
    boundaries: Boundaries,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """FlashAttention of each sequence to its own keys; returns `[S, heads, D of values]`."""

    def attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return FlashCall(boundaries, scaling, window).forward(queries, keys, values)[0]

    return of_one_width(attention, queries, keys, values, scaling)


def efficient_attention(
    queries: Tensor,  # [S, heads, D]
    keys: Tensor,  # [K, key heads, D]
    values: Tensor,  # [K, key heads, D of values]
    boundaries: Boundaries,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """
    Torch's memory-efficient attention of each sequence to its own keys: for float32 and for heads that are wider than
    FlashAttention takes.

    Returns:
        `Tensor`: `[S, heads, D of values]`.
    """
    groups = queries.shape[1] // keys.shape[1]

    def attention(*tensors_and_scaling: Any) -> Tensor:
        *tensors, scaling = tensors_and_scaling
        q, k, v = (t.unsqueeze(0) for t in tensors)
        output, *_ = torch_compat.efficient_attention(
            *(q, k, v, None, *boundaries, 0.0, torch_compat.CAUSAL_FROM_THE_LAST_KEY),
            compute_log_sumexp=True,
            scale=scaling,
            window_size=window,
        )
        return output.squeeze(0)

    keys, values = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (keys, values))
    return of_one_width(attention, queries, keys, values, scaling)
