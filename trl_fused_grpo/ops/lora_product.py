"""A linear layer with LoRA's low-rank terms, added within the products: no scale, cast or sum over all features."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


# On CUDA a product of bfloat16 matrices can be written in float32 (torch >= 2.8)
_WRITES_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")


class LoraTerm(NamedTuple):
    """
    One adapter beside a linear layer: `scale * b @ a`.

    Args:
        a (`Tensor`): shape `[r, H]`.
        b (`Tensor`): shape `[O, r]`.
        scale (`float`): multiplier of the term.
        x (`Tensor`, *optional*): the input `[..., H]` after dropout, where the adapter has one.
    """

    a: Tensor
    b: Tensor
    scale: float
    x: Tensor | None = None


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: Sequence[LoraTerm], dtype: torch.dtype
) -> Tensor:
    """
    `x @ weight^T + bias`, and `scale * (x @ a^T) @ b^T` of each term. Every product accumulates in float32; the output
    is rounded once for the base and once for each term.

    Args:
        x (`Tensor`): shape `[..., H]`.
        weight (`Tensor`): shape `[O, H]`, frozen or trained.
        bias (`Tensor`, *optional*): shape `[O]`.
        terms (`Sequence[LoraTerm]`): at least one.
        dtype (`torch.dtype`): of the products and of the output, as autocast would have it.

    Returns:
        `Tensor`: shape `[..., O]`. Gradients come in the dtypes of their tensors.
    """
    inputs = [tensor for term in terms for tensor in (term.a, term.b, term.x)]
    return _LoraLinear.apply(x, _cast(x, dtype), weight, bias, [term.scale for term in terms], *inputs)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """
    A tensor in another dtype. Layers that share an input (queries, keys, values) cast it once: the copy is kept at the
    tensor, and goes with it.
    """
    if x.dtype == dtype:
        return x.detach()
    if x.is_inference():  # has no version
        return x.to(dtype)
    kept: Any = getattr(x, "_lora_copy", None)
    if kept is None or kept[0] != x._version or kept[1].dtype != dtype:
        kept = x._version, x.detach().to(dtype)
        x._lora_copy = kept  # ty: ignore[unresolved-attribute]
    return kept[1]


class _LoraLinear(torch.autograd.Function):
    """
    The base's product comes first and is the one that the layer has without adapters. So an adapter whose `b` is zero,
    as at the beginning of a training, changes no bit. In backward it comes last: it is bound by arithmetic, so that
    adding itself to what is there costs little.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [..., H]
        x_cast: Tensor,  # [..., H]
        weight: Tensor,  # [O, H]
        bias: Tensor | None,  # [O]
        scales: list[float],
        *inputs: Tensor | None,  # [r, H], [O, r] and [..., H] of each term
    ):
        dtype, (out_features, width) = x_cast.dtype, weight.shape
        rows, weight_cast = x_cast.reshape(-1, width), weight.to(dtype)  # [N, H], [O, H]
        y = torch.empty(*x.shape[:-1], out_features, dtype=dtype, device=x.device)  # [..., O], no view of another
        y_rows = y.view(-1, out_features)  # [N, O]
        if bias is None:
            torch.mm(rows, weight_cast.t(), out=y_rows)  # [N, H] @ [H, O]
        else:
            torch.addmm(bias.to(dtype), rows, weight_cast.t(), out=y_rows)
        kept: list[Tensor | None] = []
        for i, scale in enumerate(scales):
            a, b, dropped = (None if tensor is None else tensor.to(dtype) for tensor in inputs[3 * i : 3 * i + 3])
            assert a is not None and b is not None
            dropped = None if dropped is None else dropped.reshape(-1, width)  # [N, H]
            h = (rows if dropped is None else dropped) @ a.t()  # [N, H] @ [H, r]
            y_rows.addmm_(h, b.t(), alpha=scale)  # [N, r] @ [r, O]
            kept += [a, b, h, dropped]
        ctx.scales, ctx.shape = scales, x.shape
        ctx.dtypes = [None if t is None else t.dtype for t in (x, x_cast, weight, bias, None, *inputs)]
        ctx.save_for_backward(rows, weight_cast, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        device = grad.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return _gradients(ctx, grad)
        return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of the inputs of [`_LoraLinear`], in their order; `None` where not needed."""
    rows, weight, *kept = ctx.saved_tensors
    needs, dtypes = ctx.needs_input_grad, ctx.dtypes
    grad = grad.reshape(-1, weight.shape[0])  # [N, O]
    out: list[Tensor | None] = [None] * len(needs)
    grad_x = _empty(rows.shape, grad, dtypes[0]) if needs[0] else None  # [N, H]
    is_written = False
    for i, scale in enumerate(ctx.scales):
        (a, b, h, dropped), place = kept[4 * i : 4 * i + 4], 5 + 3 * i
        inner = grad @ b  # [N, O] @ [O, r]
        if needs[place]:
            out[place] = _product(inner.t(), rows if dropped is None else dropped, dtypes[place], scale)  # [r, H]
        if needs[place + 1]:
            out[place + 1] = _product(grad.t(), h, dtypes[place + 1], scale)  # [O, r]
        if needs[place + 2]:
            out[place + 2] = _product(inner, a, dtypes[place + 2], scale).view(ctx.shape)  # [..., H]
        elif dropped is None and grad_x is not None:
            _add_product(inner, a, grad_x, scale, is_written)  # [N, r] @ [r, H]
            is_written = True
    if grad_x is not None:
        _add_product(grad, weight, grad_x, 1.0, is_written)  # [N, O] @ [O, H]
        out[0] = grad_x.to(dtypes[0]).view(ctx.shape)
    if needs[2]:
        out[2] = _product(grad.t(), rows, dtypes[2])  # [O, H]
    if needs[3]:
        out[3] = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(dtypes[3])
    return tuple(out)


def _empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor for a product of matrices like `like`: of `dtype` where it can be written there at once."""
    is_direct = dtype == torch.float32 and like.is_cuda and _WRITES_FLOAT32
    return torch.empty(shape, dtype=dtype if is_direct else like.dtype, device=like.device)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`scale * a @ b` in a dtype."""
    out = _empty((a.shape[0], b.shape[1]), a, dtype)
    _add_product(a, b, out, scale, False)
    return out.to(dtype)


def _add_product(a: Tensor, b: Tensor, out: Tensor, scale: float, is_written: bool) -> None:
    """`out += scale * a @ b`, or `out = scale * a @ b` where nothing is written there yet."""
    beta = 1.0 if is_written else 0.0
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=beta, alpha=scale)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
