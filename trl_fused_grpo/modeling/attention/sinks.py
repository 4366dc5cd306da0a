"""
FlashAttention with sinks: each head has a score more, whose value is zero, so that a token may attend to nothing.

The softmax over scores `s` and a sink `a` is the softmax over `s` times `exp(lse - lse')`, where `lse` is the
log-sum-exp of `s` and `lse' = log(exp(lse) + exp(a))`. FlashAttention's backward takes the probabilities from the
log-sum-exp and the term `dO . O` from the output that it is given: with `lse'` and the scaled output both are those of
the softmax with the sink, and so are the gradients of queries, keys and values. The sink's own is
`-exp(a - lse') (dO . O)`, summed over the tokens.
"""

from typing import Any

import torch
from torch import Tensor

from .kernels import Boundaries, FlashCall, of_one_width


def sink_attention(
    queries: Tensor,  # [S, heads, D]
    keys: Tensor,  # [K, key heads, D]
    values: Tensor,  # [K, key heads, D of values]
    sinks: Tensor,  # [heads]
    boundaries: Boundaries,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of each sequence to its own keys and to the sinks; returns `[S, heads, D of values]`."""

    def attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return _SinkAttention.apply(queries, keys, values, sinks, FlashCall(boundaries, scaling, window))

    return of_one_width(attention, queries, keys, values, scaling)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, call: FlashCall) -> Tensor:
        output, lse, state, unused, *_ = call.forward(queries, keys, values)
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))  # as `lse`: [heads, S]
        factor = _by_token((lse - with_sink).exp(), call.boundaries, len(queries))  # [S, heads]
        output.mul_(factor.unsqueeze(-1))
        ctx.save_for_backward(queries, keys, values, output, with_sink, state, unused, sinks)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        output, with_sink = saved[3:5]
        grad = grads[0].contiguous()
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            lse = _by_token(with_sink, ctx.call.boundaries, len(output))  # [S, heads]
            delta = (grad.to(lse.dtype) * output).sum(-1)  # [S, heads]
            grad_sinks = -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)
        return *ctx.call.backward(grad, *saved), grad_sinks, None


def _by_token(values: Tensor, boundaries: Boundaries, count: int) -> Tensor:
    """
    What FlashAttention gives for each query as `[S, heads]`: from `[heads, S]`, or from `[sequences, heads, longest]`
    as older kernels of torch lay it out.
    """
    if values.dim() == 2:
        return values.t()
    cu_seqlens = boundaries.cu_seq_lens_q.long()
    token = torch.arange(count, device=values.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return values[sequence, :, token - cu_seqlens[sequence]]
