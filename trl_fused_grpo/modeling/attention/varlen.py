"""Attention over several sequences that are packed into one row, each of which attends to itself alone."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat

from .kernels import (
    Boundaries,
    FlashCall,
    autocast_dtype,
    efficient_attention,
    efficient_takes,
    flash_takes,
    of_one_width,
)


def cu_seqlens_arguments(
    lengths: Sequence[int], key_lengths: Sequence[int], shared: "SharedPrefixKV | None", device: torch.device
) -> dict[str, Any]:
    """
    Keyword arguments that tell attention layers where packed sequences begin, under transformers' names. They go
    through every layer, so that gradient checkpointing finds them again in backward.
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
    """Where the keys of each sequence are, when several attend to the same ones."""

    index: Tensor  # [K]: position in the row of `S` tokens
    first: Tensor  # [S]: where in `index` each position stands first; anything for one that does not
    shared: Tensor  # [P]: the positions that stand there more than once, or not at all, and the first two
    copies: Tensor  # [P, C]: where in `index` each of these stands, filled up with `K`

    @classmethod
    def at(cls, index: Tensor, count: int) -> "SharedPrefixKV":
        """From positions `[K]` in a row of `count` tokens."""
        positions, places = index.sort(stable=True)
        starts = torch.searchsorted(positions, torch.arange(count + 1, device=index.device))
        first = places[starts[:-1].clamp(max=len(places) - 1)]
        counts = starts.diff()
        is_shared = counts != 1
        is_shared[:2] = True  # for sizes of 0 and 1 torch compiles a code of their own
        shared = is_shared.nonzero().squeeze(1)
        nth = torch.arange(max(int(counts.max()), 2), device=index.device)  # [C]
        copies = places[(starts[shared].unsqueeze(1) + nth).clamp(max=len(places) - 1)]
        return cls(index, first, shared, copies.where(nth < counts[shared].unsqueeze(1), len(places)))


def _sum_of_copies(grad: Tensor, first: Tensor, shared: Tensor, copies: Tensor) -> Tensor:
    """The gradient of `[S, heads, D]` from that of what each sequence sees of it; places as in [`SharedPrefixKV`]."""
    is_filled_up = (copies == len(grad)).unflatten(1, (-1, 1, 1))  # [P, C, 1, 1]
    of_copies = grad[copies.clamp(max=len(grad) - 1)].masked_fill_(is_filled_up, 0)  # [P, C, heads, D]
    sums = of_copies.sum(1, dtype=torch.promote_types(grad.dtype, torch.float32))
    return grad.index_select(0, first).index_copy(0, shared, sums.to(grad.dtype))


class _GatherKeys(torch.autograd.Function):
    """
    Keys, or values, `[S, heads, D]` as each sequence sees them `[K, heads, D]`; copies add up their gradients. torch's
    compiler sees through it: a gather is part of a kernel then.
    """

    @staticmethod
    def forward(ctx, keys: Tensor, index: Tensor, *places: Tensor) -> Tensor:
        ctx.save_for_backward(*places)
        return keys.index_select(0, index)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_copies(grads[0], *ctx.saved_tensors), None, None, None, None


def gathered_keys(key: Tensor, value: Tensor, shared: SharedPrefixKV | None) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, key heads, S, D]` as each sequence sees them `[1, key heads, K, D]`."""
    if shared is None:
        return key, value
    keys, values = (_GatherKeys.apply(tensor, *shared) for tensor in by_token(key, value))
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def chunked(options: dict[str, Any], tokens: int) -> dict[str, Any]:
    """
    The arguments under which each chunk of a sequence is a sequence of its own, for attention in chunks of `tokens`,
    counted from the first key of a sequence. Keys of chunks without queries are left out.
    """
    cu_seqlens, cu_keys = options["cu_seq_lens_q"], options["cu_seq_lens_k"].tolist()
    shared: SharedPrefixKV | None = options.get("shared_prefix_kv")
    lengths, key_lengths, kept = [], [], []
    for length, begin, end in zip(cu_seqlens.diff().tolist(), cu_keys[:-1], cu_keys[1:], strict=True):
        first_query = end - length
        first_key = begin + (first_query - begin) // tokens * tokens
        kept.append((first_key, end))
        for start in range(first_key, end, tokens):
            stop = min(start + tokens, end)
            key_lengths.append(stop - start)
            lengths.append(stop - max(start, first_query))
    if shared is not None:
        index = torch.cat([shared.index[start:stop] for start, stop in kept])
        shared = SharedPrefixKV.at(index, len(shared.first))
    return cu_seqlens_arguments(lengths, key_lengths, shared, cu_seqlens.device)


def varlen_attention(
    module: nn.Module | None,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D of values]
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
        `Tensor`: `[1, S, heads, D of values]`.
    """
    boundaries = Boundaries(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if flash_takes(query, value):

        def attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            call = FlashCall(boundaries, scaling, sliding_window)
            return _PackedFlash.apply(query, key, value, call, shared_prefix_kv)

        return of_one_width(attention, query, key, value, scaling)
    query, key, value = (tensor.to(autocast_dtype(tensor)) for tensor in (query, key, value))
    key, value = gathered_keys(key, value, shared_prefix_kv)
    return _without_flash(*by_token(query, key, value), boundaries, scaling, sliding_window).unsqueeze(0)


def traced_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    packed_window: int | None,
    shared_prefix_kv: SharedPrefixKV | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> Tensor:
    """The same as torch's compiler sees it, with the window of the layer's mask in `packed_window`."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    further = [others.get(name) for name in model_compat.FURTHER_SDPA_ARGUMENTS]
    if attention_mask is not None or dropout or not is_causal or any(value is not None for value in further):
        raise NotImplementedError("attention of more than causality and a window")
    boundaries = Boundaries(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    queries, keys, values = by_token(*(tensor.to(autocast_dtype(tensor)) for tensor in (query, key, value)))
    if shared_prefix_kv is not None:
        keys, values = (_GatherKeys.apply(tensor, *shared_prefix_kv) for tensor in (keys, values))

    def flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return FlashCall(boundaries, scaling, packed_window).forward(queries, keys, values)[0]

    if flash_takes(query, value):
        return of_one_width(flash, queries, keys, values, scaling).unsqueeze(0)
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(queries, keys, values, *boundaries, scaling, packed_window).unsqueeze(0)


@torch.library.custom_op("trl_fused_grpo::attend", mutates_args=())
def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attention of `[S, heads, D]` to `[K, key heads, D]` where FlashAttention does not take them: `[S, heads, D]`."""
    boundaries = Boundaries(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    return _without_flash(queries, keys, values, boundaries, scaling, window).contiguous()


@_attend.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return queries.new_empty(*queries.shape[:2], values.shape[-1])


@torch.library.custom_op("trl_fused_grpo::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    boundaries = Boundaries(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    with torch_compat.autograd_within_operation():
        leaves = [tensor.detach().requires_grad_() for tensor in (queries, keys, values)]
        output = _without_flash(*leaves, boundaries, scaling, window)
        found = torch.autograd.grad(output, leaves, grad)
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@_attend_backward.register_fake
def _(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def _backward_of_attend(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


_attend.register_autograd(_backward_of_attend, setup_context=_keep_inputs)


def _without_flash(
    queries: Tensor, keys: Tensor, values: Tensor, boundaries: Boundaries, scaling: float | None, window: int | None
) -> Tensor:
    if efficient_takes(queries):
        return efficient_attention(queries, keys, values, boundaries, scaling, window)
    lengths, key_lengths = (places.diff().tolist() for places in boundaries[:2])
    parts = queries.split(lengths), keys.split(key_lengths), values.split(key_lengths)
    return torch.cat([_one_sequence(*part, scaling, window) for part in zip(*parts, strict=True)], dim=1).squeeze(0)


class _PackedFlash(torch.autograd.Function):
    """
    FlashAttention of queries `[1, heads, S, D]`, keys and values `[1, key heads, S, D]`, as layers have them; returns
    `[1, S, heads, D]`. Casts, copies of shared keys and the kernel are one node of the graph: at a few thousand tokens
    some thirty nodes take the CPU longer than their kernels the GPU.
    """

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, call: FlashCall, shared: SharedPrefixKV | None
    ) -> Tensor:
        ctx.call, ctx.dtypes = call, (query.dtype, key.dtype, value.dtype)
        queries, keys, values = by_token(*(tensor.to(autocast_dtype(tensor)) for tensor in (query, key, value)))
        if shared is not None:
            keys, values = keys.index_select(0, shared.index), values.index_select(0, shared.index)
        results = call.forward(queries, keys, values)[:4]
        ctx.save_for_backward(queries, keys, values, *results, *(() if shared is None else shared[1:]))
        return results[0].unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpointed layer is computed again for those who ask twice
        of_attention, places = saved[:7], saved[7:]
        of_queries, *of_keys = ctx.call.backward(grads[0].squeeze(0).contiguous(), *of_attention)
        if places:
            of_keys = [_sum_of_copies(grad, *places) for grad in of_keys]
        found = zip((of_queries, *of_keys), ctx.dtypes, ctx.needs_input_grad, strict=False)
        of_inputs = (grad.transpose(0, 1).unsqueeze(0).to(dtype) if needed else None for grad, dtype, needed in found)
        return *of_inputs, None, None


def by_token(*tensors: Tensor) -> Iterator[Tensor]:
    """Tensors `[1, heads, S, D]` as `[S, heads, D]`."""
    return (tensor.squeeze(0).transpose(0, 1) for tensor in tensors)


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


def causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which of its `keys` each of the last `length` tokens of a sequence attends to `[length, keys]`."""
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (keys if window is None else window))
