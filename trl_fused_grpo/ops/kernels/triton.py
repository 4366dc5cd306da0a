"""
Triton kernels over chunks of logits. `kernels/torch.py` has the same functions and documents their arguments.

Memory traffic bounds both kernels: `logprob_forward` reads each logit once, `logits_grad_` reads and writes it once.
Arithmetic is float32, whatever the dtype of the logits.

The kernels receive the transform as two factors. `inner` multiplies the raw logits, then the tanh of a softcap follows,
then `outer`, which is always positive, multiplies the result. Maxima are taken before `outer`, so that `z - max(z)` is
exact for logits of any size.
"""

# ruff: noqa: N803 - Triton writes the constants of a kernel in upper case

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform


# Measured on one H200 with rows of 151,936 bf16 logits, see benchmarks/NOTES.md
_FORWARD_BLOCK, _FORWARD_WARPS = 4096, 8
_GRAD_BLOCK, _GRAD_WARPS = 4096, 4
# Columns that one thread reduces by itself: 16 bytes of bf16, one load
_WIDTH = tl.constexpr(8)

_LOG2_E = tl.constexpr(1 / math.log(2))
# exp() of anything below is 0, and 0 * -1e4 is 0 where 0 * -inf would be NaN
_LOG_ZERO = tl.constexpr(-1e4)


@triton.jit
def _tanh(x):
    # The sigmoid identity cancels near 0, where the series is exact to float32
    x2 = x * x
    series = x * (1 - x2 * (1.0 / 3 - x2 * (2.0 / 15 - x2 * (17.0 / 315))))
    return tl.where(x2 < 0.01, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _before_outer(raw, inner, HAS_SOFTCAP: tl.constexpr):
    z = raw.to(tl.float32) * inner
    if HAS_SOFTCAP:
        z = _tanh(z)
    return z


@triton.jit
def _columns(BLOCK: tl.constexpr):
    # [BLOCK / WIDTH, WIDTH]: the second axis lies within a thread, so reducing it needs no exchange between threads
    return tl.arange(0, BLOCK // _WIDTH)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]


@triton.jit
def _merge(z, m, s, t, outer, HAS_ENTROPY: tl.constexpr):
    # Update each group's running m = max(z), s = sum(2^u) and t = sum(2^u u), where u = outer (z - m) / ln 2
    new_m = tl.maximum(m, tl.max(z, axis=1))
    # A group that has read nothing but -inf is shifted by 0: -inf - -inf would be NaN
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    step = tl.maximum((m - shift) * (outer * _LOG2_E), _LOG_ZERO)
    rescale = tl.exp2(step)
    u = (z - shift[:, None]) * (outer * _LOG2_E)
    e = tl.exp2(u)
    if HAS_ENTROPY:
        t = rescale * (t + s * step) + tl.sum(e * tl.maximum(u, _LOG_ZERO), axis=1)
    s = s * rescale + tl.sum(e, axis=1)
    return new_m, s, t


@triton.jit
def _logprob_forward_kernel(
    logits_ptr,
    row_stride,
    n_cols,
    targets_ptr,
    logps_ptr,
    lse_ptr,
    entropies_ptr,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row. Each group of columns keeps its own statistics; threads exchange theirs at the end only.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = _columns(BLOCK)
    m = tl.full((BLOCK // _WIDTH,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK // _WIDTH,), tl.float32)
    t = tl.zeros((BLOCK // _WIDTH,), tl.float32)

    # Only the last block is masked: a mask of odd width would break up the 16-byte loads of all the others
    whole = n_cols // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        raw = tl.load(logits_ptr + start + columns)
        m, s, t = _merge(_before_outer(raw, inner, HAS_SOFTCAP), m, s, t, outer, HAS_ENTROPY)
    if whole < n_cols:
        inside = whole + columns < n_cols
        raw = tl.load(logits_ptr + whole + columns, mask=inside, other=0.0)
        z = tl.where(inside, _before_outer(raw, inner, HAS_SOFTCAP), float("-inf"))
        m, s, t = _merge(z, m, s, t, outer, HAS_ENTROPY)

    highest = tl.max(m, axis=0)
    step = (m - tl.where(highest == float("-inf"), 0.0, highest)) * (outer * _LOG2_E)
    step = tl.maximum(step, _LOG_ZERO)
    rescale = tl.exp2(step)
    total = tl.sum(s * rescale, axis=0)
    log_total = tl.log(total)
    target = tl.load(targets_ptr + row)
    raw = tl.load(logits_ptr + target, mask=(target >= 0) & (target < n_cols), other=float("nan"))
    # Subtract first: both terms may be large where the log-probability is small
    tl.store(logps_ptr + row, (_before_outer(raw, inner, HAS_SOFTCAP) - highest) * outer - log_total)
    tl.store(lse_ptr + row, highest * outer + log_total)
    if HAS_ENTROPY:
        # log(total) - mean(u): neither -mean(u) nor log(total) is negative, so nothing cancels in a peaked row
        moment = tl.sum(rescale * (t + s * step), axis=0)
        tl.store(entropies_ptr + row, log_total - moment / total / _LOG2_E)


@triton.jit
def _grad(
    raw, columns, target, lse, entropy, g, ge, inner, outer, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY_GRAD: tl.constexpr
):
    # g (onehot - p) - ge p (log p + H), times the slope of the softcap; the rest of the transform is in g and ge
    z = _before_outer(raw, inner, HAS_SOFTCAP)
    log_p = tl.fma(z, outer, -lse)
    weight = g
    if HAS_ENTROPY_GRAD:
        weight = g + ge * (tl.maximum(log_p, _LOG_ZERO) + entropy)
    grad = tl.where(columns == target, g, 0.0) - weight * tl.exp(log_p)
    if HAS_SOFTCAP:
        grad *= 1 - z * z
    return grad


@triton.jit
def _logits_grad_kernel(
    logits_ptr,
    row_stride,
    n_cols,
    blocks_per_row,
    targets_ptr,
    lse_ptr,
    entropies_ptr,
    grad_logps_ptr,
    grad_entropies_ptr,
    vocab_start,
    inner,
    outer,
    slope,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per block of one row, on a single grid axis whose neighbours are neighbours in memory
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    start = (tl.program_id(0) % blocks_per_row) * BLOCK
    columns = start + tl.arange(0, BLOCK)  # [BLOCK]
    pointers = logits_ptr + row * row_stride + columns
    target = (tl.load(targets_ptr + row) - vocab_start).to(tl.int32)
    lse = tl.load(lse_ptr + row)
    g = tl.load(grad_logps_ptr + row) * slope
    entropy = 0.0
    ge = 0.0
    if HAS_ENTROPY_GRAD:
        entropy = tl.load(entropies_ptr + row)
        ge = tl.load(grad_entropies_ptr + row) * slope
    # As in the forward kernel, a block that lies inside the row needs no mask
    if start + BLOCK <= n_cols:
        raw = tl.load(pointers)
        grad = _grad(raw, columns, target, lse, entropy, g, ge, inner, outer, HAS_SOFTCAP, HAS_ENTROPY_GRAD)
        tl.store(pointers, grad.to(logits_ptr.dtype.element_ty))
    else:
        inside = columns < n_cols
        raw = tl.load(pointers, mask=inside, other=0.0)
        grad = _grad(raw, columns, target, lse, entropy, g, ge, inner, outer, HAS_SOFTCAP, HAS_ENTROPY_GRAD)
        tl.store(pointers, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def _factors(transform: LogitTransform) -> tuple[float, float, float]:
    """Return `inner`, `outer` and the slope of the transform at zero, where the tanh has slope one."""
    slope = transform.logit_scale / transform.temperature
    if slope == 0.0:
        return 0.0, 1.0, 0.0  # all logits alike, and `outer` stays positive
    if transform.softcap is None:
        return math.copysign(1.0, slope), abs(slope), slope
    return transform.logit_scale / transform.softcap, transform.softcap / transform.temperature, slope


def _block(largest: int, n_cols: int) -> int:
    """Columns that one program handles at a time: a power of two."""
    return min(largest, max(triton.next_power_of_2(n_cols), 256))


def logprob_forward(
    logits: Tensor,  # [n, V]
    targets: Tensor,  # [n]
    transform: LogitTransform,
    logps: Tensor,  # [n]
    lse: Tensor,  # [n]
    entropies: Tensor | None,  # [n]
) -> None:
    """Compute log-probability, log-sum-exp and entropy of each row of logits (nats, float32); any row stride."""
    n, n_cols = logits.shape
    if n == 0:
        return
    inner, outer, _ = _factors(transform)
    statistics = (targets, logps, lse, lse if entropies is None else entropies)
    flags = {"HAS_SOFTCAP": transform.softcap is not None, "HAS_ENTROPY": entropies is not None}
    with torch.cuda.device_of(logits):
        _logprob_forward_kernel[(n,)](
            logits,
            logits.stride(0),
            n_cols,
            *statistics,
            inner,
            outer,
            **flags,
            BLOCK=_block(_FORWARD_BLOCK, n_cols),
            num_warps=_FORWARD_WARPS,
        )


def logits_grad_(
    logits: Tensor,  # [n, v]
    targets: Tensor,  # [n]
    lse: Tensor,  # [n]
    entropies: Tensor | None,  # [n]
    grad_logps: Tensor,  # [n]
    grad_entropies: Tensor | None,  # [n]
    transform: LogitTransform,
    vocab_start: int = 0,
) -> None:
    """Overwrite a tile of raw logits, from column `vocab_start` on, with the gradient with respect to them."""
    n, n_cols = logits.shape
    if n == 0:
        return
    block = _block(_GRAD_BLOCK, n_cols)
    blocks_per_row = triton.cdiv(n_cols, block)
    has_entropy_grad = grad_entropies is not None
    gradients = (lse, entropies, grad_logps, grad_entropies) if has_entropy_grad else (lse, lse, grad_logps, lse)
    # The gradient of a complex tensor's real part has a stride of two
    gradients = tuple(per_row.contiguous() for per_row in gradients)
    flags = {"HAS_SOFTCAP": transform.softcap is not None, "HAS_ENTROPY_GRAD": has_entropy_grad}
    with torch.cuda.device_of(logits):
        _logits_grad_kernel[(n * blocks_per_row,)](
            logits,
            logits.stride(0),
            n_cols,
            blocks_per_row,
            targets,
            *gradients,
            vocab_start,
            *_factors(transform),
            **flags,
            BLOCK=block,
            num_warps=_GRAD_WARPS,
        )
