"""A linear layer with LoRA's low-rank terms, added within the products: no scale, cast or sum over all features."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .lm_head import LowRank


# On CUDA a product of bfloat16 matrices can be written in float32 (torch >= 2.8)
_WRITES_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")
# The tensor that has a copy of itself in another dtype: one at a time
_last_cast: ref[Tensor] | None = None


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, terms: Sequence[LowRank], dtype: torch.dtype) -> Tensor:
    """
    `x @ weight^T + bias`, and `scale * (dropout(x) @ a^T) @ b^T` of each term. Every product accumulates in float32;
    the output is rounded once for the base and once for each term.

    Args:
        x (`Tensor`): shape `[..., H]`.
        weight (`Tensor`): shape `[O, H]`, frozen or trained.
        bias (`Tensor`, *optional*): shape `[O]`.
        terms (`Sequence[LowRank]`): factors `[r, H]` and `[O, r]` of each adapter, its scale and its dropout.
        dtype (`torch.dtype`): of the products and of the output, as autocast would have it.

    Returns:
        `Tensor`: shape `[..., O]`. Gradients come in the dtypes of their tensors.
    """
    options = [(term.scale, term.dropout) for term in terms]
    return _LoraLinear.apply(
        x, cast_once(x, dtype), weight, bias, options, *(factor for term in terms for factor in (term.a, term.b))
    )


def cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """
    A tensor in another dtype, without gradient. Layers that share an input (queries, keys, values) cast it once: the
    copy is kept at the tensor, until that goes or another one is cast.
    """
    global _last_cast
    if x.dtype == dtype:
        return x.detach()
    if x.is_inference():  # has no version
        return x.to(dtype)
    holder: Any = x
    kept = getattr(x, "_lora_copy", None)
    if kept is None or kept[0] != x._version or kept[1].dtype != dtype:
        last: Any = None if _last_cast is None else _last_cast()
        if last is not None:  # checkpointing may keep it
            last._lora_copy = None
        kept = holder._lora_copy = x._version, x.detach().to(dtype)
        _last_cast = ref(x)
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
        options: list[tuple[float, float]],
        *factors: Tensor,  # [r, H] and [O, r] of each term
    ):
        dtype, (out_features, width) = x_cast.dtype, weight.shape
        rows, weight_cast = x_cast.reshape(-1, width), weight.to(dtype)  # [N, H], [O, H]
        y = torch.empty(*x.shape[:-1], out_features, dtype=dtype, device=x.device)  # [..., O], no view of another
        y_rows = y.view(-1, out_features)  # [N, O]
        if bias is None:
            torch.mm(rows, weight_cast.t(), out=y_rows)  # [N, H] @ [H, O]
        else:
            torch.addmm(bias.to(dtype), rows, weight_cast.t(), out=y_rows)  # [N, H] @ [H, O]
        kept: list[Tensor | None] = []
        for (scale, dropout), a, b in zip(options, factors[::2], factors[1::2], strict=True):
            dropped = mask = None
            if dropout:  # of the input in the dtype of the factors, for which PEFT draws the random numbers
                dropped, mask = _dropout(x.to(a.dtype), dropout)
                dropped, mask = dropped.to(dtype).reshape(-1, width), mask.reshape(-1, width)  # [N, H]
            a, b = a.to(dtype), b.to(dtype)
            h = (rows if dropped is None else dropped) @ a.t()  # [N, H] @ [H, r]
            y_rows.addmm_(h, b.t(), alpha=scale)  # [N, r] @ [r, O]
            kept += [a, b, h, dropped, mask]
        ctx.options, ctx.shape = options, x.shape
        ctx.dtypes = [tensor.dtype if isinstance(tensor, Tensor) else None for tensor in (x, weight, bias, *factors)]
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
    needs_x, _, needs_weight, needs_bias, _, *needs_factors = ctx.needs_input_grad
    x_dtype, weight_dtype, bias_dtype, *factor_dtypes = ctx.dtypes
    grad = grad.reshape(-1, weight.shape[0])  # [N, O]
    grad_x = _GradOfInput(rows, grad, x_dtype) if needs_x else None
    grad_factors: list[Tensor | None] = [None] * len(needs_factors)
    for i, (scale, dropout) in enumerate(ctx.options):
        a, b, h, dropped, mask = kept[5 * i : 5 * i + 5]
        inner = grad @ b  # [N, O] @ [O, r]
        if needs_factors[2 * i]:
            x = rows if dropped is None else dropped
            grad_factors[2 * i] = _product(inner.t(), x, factor_dtypes[2 * i], scale)  # [r, N] @ [N, H]
        if needs_factors[2 * i + 1]:
            grad_factors[2 * i + 1] = _product(grad.t(), h, factor_dtypes[2 * i + 1], scale)  # [O, N] @ [N, r]
        if grad_x is not None and mask is None:
            grad_x.add(inner, a, scale)  # [N, r] @ [r, H]
        elif grad_x is not None:
            grad_x.add_masked(inner, a, scale * _kept_scale(dropout), mask)  # [N, r] @ [r, H]
    if grad_x is not None:
        grad_x.add(grad, weight)  # [N, O] @ [O, H]
    grad_weight = _product(grad.t(), rows, weight_dtype) if needs_weight else None  # [O, N] @ [N, H]
    sum_dtype = torch.promote_types(grad.dtype, torch.float32)
    grad_bias = grad.sum(0, dtype=sum_dtype).to(bias_dtype) if needs_bias else None
    grad_x = None if grad_x is None else grad_x.value.to(x_dtype).view(ctx.shape)
    return grad_x, None, grad_weight, grad_bias, None, *grad_factors


class _GradOfInput:
    """
    The gradient of a layer's input `[N, H]`, a sum of products.

    Args:
        rows (`Tensor`): the input `[N, H]`.
        grad (`Tensor`): the gradient of the output, in the dtype of the products.
        dtype (`torch.dtype`): of the input, as autograd knows it.
    """

    def __init__(self, rows: Tensor, grad: Tensor, dtype: torch.dtype):
        self.value = _empty(rows.shape, grad, dtype)
        self._is_written = False

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """Add `scale * a @ b`."""
        _add_product(a, b, self.value, scale, self._is_written)
        self._is_written = True

    def add_masked(self, a: Tensor, b: Tensor, scale: float, mask: Tensor) -> None:
        """Add `scale * a @ b` where a mask `[N, H]` is not zero."""
        product = _product(a, b, a.dtype, scale)
        if self._is_written:
            self.value.addcmul_(product, mask)
        else:
            torch.mul(product, mask, out=self.value)
        self._is_written = True


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What `F.dropout` makes of a tensor, from the same random numbers, and the mask of what it keeps."""
    if p == 1:  # draws nothing
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if x.is_cuda:
        return torch.native_dropout(x, p, True)
    mask = torch.empty_like(x).bernoulli_(1 - p)
    return x * (mask * _kept_scale(p)), mask.bool()


def _kept_scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


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
