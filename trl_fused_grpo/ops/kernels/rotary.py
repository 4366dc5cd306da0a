"""
A Triton kernel of rotary embeddings, forward and backward: `layer_functions` has the formula, in torch, and says what
the arguments are. Each tensor is read once and written once; arithmetic is float32, rounded where the model rounds.
"""

# ruff: noqa: N803 - Triton writes the constants of a kernel in upper case

import functools

import triton
import triton.language as tl
from torch import Tensor

from .launching import Launcher


@triton.jit
def _rotate_heads(
    x,
    y,
    cast,  # laid out as y
    cos,  # [1, HALF]
    sin,
    other_cos,
    other_sin,
    x_stride,
    y_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_CAST: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < HALF)
    first = tl.load(x + head * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + head * x_stride + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        parts = first * cos, second * other_sin, second * other_cos, -(first * sin)
    else:
        parts = first * cos, -(second * sin), second * other_cos, first * other_sin
    if ROUNDS:
        low = x.dtype.element_ty
        a, b = parts[0].to(low).to(tl.float32), parts[1].to(low).to(tl.float32)
        c, d = parts[2].to(low).to(tl.float32), parts[3].to(low).to(tl.float32)
    else:
        a, b, c, d = parts[0], parts[1], parts[2], parts[3]
    place, low, high = head * y_stride + column, (a + b).to(y.dtype.element_ty), (c + d).to(y.dtype.element_ty)
    tl.store(y + place, low, mask=inside)
    tl.store(y + place + HALF, high, mask=inside)
    if HAS_CAST:
        tl.store(cast + place, low.to(cast.dtype.element_ty), mask=inside)
        tl.store(cast + place + HALF, high.to(cast.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_cast, k_cast, length,
    q_batch, q_head, q_token, k_batch, k_head, k_token,  # strides, as are those below
    q_out_batch, q_out_head, q_out_token, k_out_batch, k_out_head, k_out_token, cos_batch, cos_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_CAST: tl.constexpr, IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    batch, token = tl.program_id(0).to(tl.int64) // length, tl.program_id(0).to(tl.int64) % length
    column = tl.arange(0, BLOCK)[None, :]
    place = batch * cos_batch + token * cos_token + column
    inside = column < HALF
    c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    other_c = tl.load(cos + place + HALF, mask=inside, other=0.0).to(tl.float32)
    other_s = tl.load(sin + place + HALF, mask=inside, other=0.0).to(tl.float32)
    from_q, to_q = q + batch * q_batch + token * q_token, batch * q_out_batch + token * q_out_token
    _rotate_heads(
        from_q, q_out + to_q, q_cast + to_q, c, s, other_c, other_s, q_head, q_out_head,
        Q_HEADS, HALF, Q_BLOCK, BLOCK, ROUNDS, HAS_CAST, IS_BACKWARD,
    )  # fmt: skip
    from_k, to_k = k + batch * k_batch + token * k_token, batch * k_out_batch + token * k_out_token
    _rotate_heads(
        from_k, k_out + to_k, k_cast + to_k, c, s, other_c, other_s, k_head, k_out_head,
        K_HEADS, HALF, K_BLOCK, BLOCK, ROUNDS, HAS_CAST, IS_BACKWARD,
    )  # fmt: skip


_launch_rotary = Launcher(_rotary_kernel)
_power_of_2 = functools.cache(triton.next_power_of_2)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    q_cast: Tensor | None,
    k_cast: Tensor | None,
    rounds: bool,
    is_backward: bool,
) -> None:
    """
    Write into `q_out` and `k_out` the rotation of `q` and `k` `[B, heads, L, D]`, or with `is_backward` their gradients
    from those of the results. In the last dimension all are contiguous; `cos` and `sin` `[B or 1, L, D]` are laid out
    alike. The results go in other dtypes into `q_cast` and `k_cast` too, which are laid out as they are.
    """
    batch, q_heads, length, width = q.shape
    half, k_heads = width // 2, k.shape[1]
    of_angles = cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)
    strides = *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *of_angles
    blocks = _power_of_2(q_heads), _power_of_2(k_heads), _power_of_2(half)
    constants = q_heads, k_heads, half, *blocks, rounds, q_cast is not None, is_backward
    casts = (q_out, k_out) if q_cast is None or k_cast is None else (q_cast, k_cast)
    _launch_rotary(batch * length, (q, k, cos, sin, q_out, k_out, *casts), (length, *strides), constants, 4)
