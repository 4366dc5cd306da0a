"""Torch's own attention kernels over several sequences in a row, and which tensors they take."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_fused_grpo._compat import torch as torch_compat


_HALF = (torch.float16, torch.bfloat16)


class Boundaries(NamedTuple):
    """Where sequences begin, under transformers' names."""

    cu_seq_lens_q: Tensor  # [sequences + 1], int32: where the queries of each sequence begin
    cu_seq_lens_k: Tensor  # the same of its keys
    max_length_q: int  # of the longest sequence
    max_length_k: int  # of the longest sequence


class FlashCall(NamedTuple):
    """FlashAttention over sequences: causal, the last query of each at its last key."""

    boundaries: Boundaries  # of the sequences
    scaling: float | None  # of the scores
    window: int | None  # the sliding window, in tokens

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


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that autocast gives a tensor for SDPA: under float32 weights, norms and rotations leave float32."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


def kernels_take(query: Tensor) -> bool:
    """Return `True` if torch's fused kernels may be called directly for tensors like a `query`."""
    # Whoever replaces SDPA wants it called
    return query.is_cuda and torch_compat.sdpa_is_own() and query.dtype in (*_HALF, torch.float32)


def flash_takes(query: Tensor, value: Tensor) -> bool:
    """
    Return `True` if FlashAttention takes tensors of these widths, cast by autocast, with zeros behind the narrower
    ones.
    """
    is_half = autocast_dtype(query) in _HALF
    return kernels_take(query) and is_half and _common_width(query, value) <= _widest_head(query.device)


def efficient_takes(query: Tensor) -> bool:
    """Return `True` if torch's memory-efficient attention takes such tensors, of any width."""
    if not kernels_take(query) or torch.version.hip is not None:  # AMD's kernel knows no sequences
        return False
    return query.dtype != torch.bfloat16 or torch.cuda.get_device_capability(query.device) >= (8, 0)


@torch.compiler.assume_constant_result
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
    keys, values = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (keys, values))
    if window is None:
        return of_one_width(_efficient(boundaries, None), queries, keys, values, scaling)
    if len(queries) == len(keys):  # and so in every sequence, none of which has more queries than keys
        return of_one_width(_efficient(boundaries, window), queries, keys, values, scaling)
    # With more keys than queries, the kernel's backward has the window at another place than its forward: a query of
    # zeros goes before those of a sequence for each key more, and what it finds is left out
    own = own_keys(boundaries, len(queries))
    queries = queries.new_zeros(len(keys), *queries.shape[1:]).index_copy(0, own, queries)
    of_keys = boundaries._replace(cu_seq_lens_q=boundaries.cu_seq_lens_k, max_length_q=boundaries.max_length_k)
    return of_one_width(_efficient(of_keys, window), queries, keys, values, scaling).index_select(0, own)


def own_keys(boundaries: Boundaries, queries: int) -> Tensor:
    """At which key each of `queries` tokens stands, `[S]`, int64: the last tokens of a sequence at its last keys."""
    cu_q, cu_k = boundaries.cu_seq_lens_q.long(), boundaries.cu_seq_lens_k.long()
    token = torch.arange(queries, device=cu_q.device)
    sequence = torch.searchsorted(cu_q, token, right=True)
    return cu_k[sequence] - (cu_q[sequence] - token)


def _efficient(boundaries: Boundaries, window: int | None) -> Callable[..., Tensor]:
    def attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        call = _EfficientCall(boundaries, scaling, window)
        q, k, v = (t.unsqueeze(0) for t in (queries, keys, values))
        output = call.forward(q, k, v)[0] if window is None else _WindowedAttention.apply(q, k, v, call)
        return output.squeeze(0)

    return attention


class _EfficientCall(NamedTuple):
    """Memory-efficient attention over sequences: causal, the last query of each at its last key, in a window."""

    boundaries: Boundaries
    scaling: float
    window: int | None  # in tokens, the query among them

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Any:
        """From `[1, S or K, heads, D]`: output, log-sum-exp, two random states and the longest lengths."""
        return torch_compat.efficient_attention(
            *(queries, keys, values, None, *self.boundaries, 0.0, torch_compat.CAUSAL_FROM_THE_LAST_KEY),
            compute_log_sumexp=True,
            scale=self.scaling,
            window_size=self.window,
        )

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; `saved` are these, output, log-sum-exp and two random states."""
        queries, keys, values, output, lse, seed, offset = saved
        grads = torch_compat.efficient_attention_backward(
            *(grad, queries, keys, values, None, output, *self.boundaries, lse, 0.0, seed, offset),
            *(torch_compat.CAUSAL_FROM_THE_LAST_KEY, False),
            scale=self.scaling,
            window_size=self.window,
        )
        return grads[:3]


class _WindowedAttention(torch.autograd.Function):
    """The kernel with its backward, which torch calls without the window."""

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor, call: _EfficientCall) -> Tensor:
        output, lse, seed, offset, *_ = call.forward(queries, keys, values)
        ctx.save_for_backward(queries, keys, values, output, lse, seed, offset)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor | None, ...]:
        return *ctx.call.backward(grads[0].contiguous(), *ctx.saved_tensors), None
