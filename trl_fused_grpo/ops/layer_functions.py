"""
What the layers of most models compute between their products: RMS norms, gated activations, rotary embeddings. Each has
a formula in torch, as models compute it operation by operation, and a function with kernels for its forward and
backward, which read and write every tensor once.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float, offset: float, casts_last: bool) -> Tensor:
    """
    The root mean square norm (Zhang and Sennrich, 2019) as models compute it.

    Args:
        x (`Tensor`): `[..., H]`.
        weight (`Tensor`): `[H]`.
        eps (`float`): added to the mean of the squares.
        offset (`float`): added to the weight: 1 in Gemma's norms.
        casts_last (`bool`): whether the result is cast to the dtype of `x`, and not what the weight multiplies.
    """
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if not casts_last:
        return (offset + weight if offset else weight) * scaled.to(x.dtype)
    return (scaled * (offset + weight.float() if offset else weight)).to(x.dtype)


def gated_formula(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """An activation (`"silu"` or `"gelu_tanh"`) of the gate, times the other projection, both `[..., I]`."""
    # Those in `torch.nn.functional` may have been replaced
    activation = torch.ops.aten.silu(gate) if kind == "silu" else torch.ops.aten.gelu(gate, approximate="tanh")
    return activation * up


def rotary_formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, heads, L, D]` turned by angles, `cos` and `sin` `[B or 1, L, D]` (Su et al., 2021)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


GATED_KINDS = ("silu", "gelu_tanh")


def _kernels() -> Any:
    return importlib.import_module("trl_fused_grpo.ops.kernels.layers")  # where there is Triton


class RMSNorm(torch.autograd.Function):
    """[`rms_norm_formula`] in one kernel, and its backward in one; arguments as there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, casts_last: bool) -> Tensor:
        dtype = x.dtype if casts_last else torch.promote_types(x.dtype, weight.dtype)
        x, weight = _dense_rows(x), weight.contiguous()
        y = torch.empty_like(x, dtype=dtype)
        ctx.save_for_backward(x, weight)
        ctx.constants = eps, offset, not casts_last
        _kernels().rms_norm(x, weight, y, *ctx.constants)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if not (grad.is_contiguous() and x.is_contiguous()) and grad.stride() != x.stride():
            grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
        grad_weight = _kernels().rms_norm_backward(x, weight, grad, grad_x, *ctx.constants, ctx.needs_input_grad[1])
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


class Gated(torch.autograd.Function):
    """[`gated_formula`] in one kernel, and its backward in one; arguments as there, both of one dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        ctx.save_for_backward(gate, up)
        ctx.kind = GATED_KINDS.index(kind)
        _kernels().gated(gate, up, y, ctx.kind)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _kernels().gated_backward(gate, up, grad.contiguous(), grad_gate, grad_up, ctx.kind)
        return grad_gate, grad_up, None


class Rotary(torch.autograd.Function):
    """[`rotary_formula`] in one kernel, and its backward in one; arguments as there. Angles get no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = _rows(q), _rows(k), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.dtypes, ctx.shapes = (q.dtype, k.dtype), (q.shape, k.shape)
        outputs = [torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype)) for x in (q, k)]
        _rotate(q, k, cos, sin, *outputs, is_backward=False)
        ctx.mark_non_differentiable(*(y for y, needs in zip(outputs, ctx.needs_input_grad, strict=False) if not needs))
        return outputs[0], outputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        some = next((grad for grad in given if grad is not None), None)
        if some is None:
            return None, None, None, None
        grads = [some.new_zeros(s) if grad is None else _rows(grad) for grad, s in zip(given, ctx.shapes, strict=True)]
        outputs = [torch.empty_like(grad, dtype=dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        _rotate(*grads, cos, sin, *outputs, is_backward=True)
        grad_q, grad_k = (None if grad is None else found for grad, found in zip(given, outputs, strict=True))
        return grad_q, grad_k, None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, is_backward: bool) -> None:
    # Of two numbers of one low precision the model rounds each product
    rounds = q.dtype == cos.dtype and q.dtype != torch.float32
    _kernels().rotary(q, k, cos, sin, q_out, k_out, rounds, is_backward)


def _dense_rows(x: Tensor) -> Tensor:
    """
    The same values, whose last dimension lies contiguous in a memory without gaps. The order of the other dimensions is
    that of `x`, as it would be in a result of torch's.
    """
    if x.is_contiguous():
        return x
    dense = torch.empty_like(x)  # without gaps
    x = x if dense.stride() == x.stride() else dense.copy_(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
