"""
Triton kernels of what the layers of a model compute between their products: RMS norms, gated activations and rotary
embeddings, forward and backward. `layer_functions` has the formulas, in torch, and says what the arguments are.

Memory traffic bounds them all: each tensor is read once and written once. Arithmetic is float32; results in between are
rounded where the model rounds them.
"""

# ruff: noqa: N803 - Triton writes the constants of a kernel in upper case

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launcher


# Elements of the rows that a program holds at a time, and its warps: 16 elements a thread
_TILE, _WARPS = 4096, 8
# Programs for each multiprocessor in the backward of a norm; each adds up a gradient of the weight of its own
_PROGRAMS = 4
_BLOCK = 2048  # elements of a gated activation in a program

SILU, GELU_TANH = 0, 1


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, weight, y, rows, eps, offset, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64) * WIDTH + column
    inside = (row < rows) & (column < WIDTH)
    value = tl.load(x + place, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    if ROUNDS:
        scaled = scaled.to(value.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    tl.store(y + place, (scaled * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward_kernel(
    x,
    weight,
    grad,
    grad_x,
    grad_weight,  # [programs, WIDTH]
    rows,
    eps,
    offset,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * WIDTH + column
        inside = (row < rows) & (column < WIDTH)
        value = tl.load(x + place, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        upper = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
        scaled = wide * scale
        of_scaled = upper * factor
        mean = tl.sum(of_scaled * scaled, axis=1)[:, None] / WIDTH
        tl.store(grad_x + place, (scale * (of_scaled - scaled * mean)).to(grad_x.dtype.element_ty), mask=inside)
        if HAS_GRAD_WEIGHT:
            if ROUNDS:
                scaled = scaled.to(value.dtype).to(tl.float32)
            total += upper * scaled
    if HAS_GRAD_WEIGHT:
        place = grad_weight + tl.program_id(0) * WIDTH + tl.arange(0, BLOCK)
        tl.store(place, tl.sum(total, axis=0), mask=tl.arange(0, BLOCK) < WIDTH)


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    """The activation of a gate, and its slope."""
    if KIND == 0:
        sigmoid = tl.sigmoid(gate)
        result = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        sigmoid = tl.sigmoid(inner)
        result = gate * sigmoid
        slope = sigmoid + result * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    return result, slope


@triton.jit
def _gated_kernel(gate, up, y, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0.0)
    result, _ = _activation(value.to(tl.float32), KIND)
    factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, (result.to(value.dtype).to(tl.float32) * factor).to(value.dtype), mask=inside)


@triton.jit
def _gated_backward_kernel(gate, up, grad, grad_gate, grad_up, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0.0)
    result, slope = _activation(value.to(tl.float32), KIND)
    factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    of_result = (upper * factor).to(value.dtype).to(tl.float32)
    tl.store(grad_gate + place, (of_result * slope).to(value.dtype), mask=inside)
    tl.store(grad_up + place, (upper * result.to(value.dtype).to(tl.float32)).to(value.dtype), mask=inside)


@triton.jit
def _rotate_heads(
    x,
    y,
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
    tl.store(y + head * y_stride + column, (a + b).to(y.dtype.element_ty), mask=inside)
    tl.store(y + head * y_stride + column + HALF, (c + d).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, length,
    q_batch, q_head, q_token, k_batch, k_head, k_token,  # strides, as are those below
    q_out_batch, q_out_head, q_out_token, k_out_batch, k_out_head, k_out_token, cos_batch, cos_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    batch, token = tl.program_id(0).to(tl.int64) // length, tl.program_id(0).to(tl.int64) % length
    column = tl.arange(0, BLOCK)[None, :]
    place = batch * cos_batch + token * cos_token + column
    inside = column < HALF
    c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    other_c = tl.load(cos + place + HALF, mask=inside, other=0.0).to(tl.float32)
    other_s = tl.load(sin + place + HALF, mask=inside, other=0.0).to(tl.float32)
    from_q, to_q = q + batch * q_batch + token * q_token, q_out + batch * q_out_batch + token * q_out_token
    _rotate_heads(
        from_q, to_q, c, s, other_c, other_s, q_head, q_out_head, Q_HEADS, HALF, Q_BLOCK, BLOCK, ROUNDS, IS_BACKWARD
    )
    from_k, to_k = k + batch * k_batch + token * k_token, k_out + batch * k_out_batch + token * k_out_token
    _rotate_heads(
        from_k, to_k, c, s, other_c, other_s, k_head, k_out_head, K_HEADS, HALF, K_BLOCK, BLOCK, ROUNDS, IS_BACKWARD
    )


_launch_rms_norm, _launch_rms_norm_backward = Launcher(_rms_norm_kernel), Launcher(_rms_norm_backward_kernel)
_launch_gated, _launch_gated_backward = Launcher(_gated_kernel), Launcher(_gated_backward_kernel)
_launch_rotary = Launcher(_rotary_kernel)


def rms_norm(x: Tensor, weight: Tensor, y: Tensor, eps: float, offset: float, rounds: bool) -> None:
    """Write into `y` the norm of the rows of `x`, both contiguous, `[..., H]`."""
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    _launch_rms_norm(-(-rows // tile), (x, weight, y), (rows, eps, offset), (width, rounds, block, tile), warps)


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    grad_x: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    has_grad_weight: bool,
) -> Tensor | None:
    """Write the gradient of `x` into `grad_x`; return that of the weight, in float32, `[H]`, if asked for."""
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    programs = min(-(-rows // tile), _PROGRAMS * _multiprocessors(x.device))
    parts = torch.empty(programs if has_grad_weight else 0, width, dtype=torch.float32, device=x.device)
    constants = width, rounds, has_grad_weight, block, tile
    tensors = x, weight, grad, grad_x, parts
    _launch_rms_norm_backward(programs, tensors, (rows, eps, offset), constants, warps)
    return parts.sum(0) if has_grad_weight else None


def gated(gate: Tensor, up: Tensor, y: Tensor, kind: int) -> None:
    """Write the activation of `gate` times `up` into `y`, all contiguous and of one dtype."""
    count = gate.numel()
    _launch_gated(-(-count // _BLOCK), (gate, up, y), (count,), (kind, _BLOCK), _WARPS)


def gated_backward(gate: Tensor, up: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, kind: int) -> None:
    """Write the gradients of `gate` and `up`."""
    count = gate.numel()
    tensors = gate, up, grad, grad_gate, grad_up
    _launch_gated_backward(-(-count // _BLOCK), tensors, (count,), (kind, _BLOCK), _WARPS)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, rounds: bool, is_backward: bool
) -> None:
    """
    Write into `q_out` and `k_out` the rotation of `q` and `k` `[B, heads, L, D]`, or with `is_backward` their gradients
    from those of the results. In the last dimension all are contiguous; `cos` and `sin` `[B or 1, L, D]` are laid out
    alike.
    """
    batch, q_heads, length, width = q.shape
    half, k_heads = width // 2, k.shape[1]
    of_angles = cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)
    strides = *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *of_angles
    blocks = _power_of_2(q_heads), _power_of_2(k_heads), _power_of_2(half)
    constants = q_heads, k_heads, half, *blocks, rounds, is_backward
    _launch_rotary(batch * length, (q, k, cos, sin, q_out, k_out), (length, *strides), constants, 4)


_power_of_2 = functools.cache(triton.next_power_of_2)


@functools.cache
def _tile(width: int) -> tuple[int, int, int]:
    """Elements of a row and rows that a program holds at a time, and its warps."""
    block = triton.next_power_of_2(width)
    return block, max(1, _TILE // block), _WARPS if block <= 2 * _TILE else 2 * _WARPS


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter runs on a CPU
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
