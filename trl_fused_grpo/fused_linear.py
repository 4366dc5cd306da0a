"""Log-probabilities and entropies of a linear head without a `[N, V]` tensor of logits, and their gradients."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import LogitTransform
from .lm_head import LMHead
from .projection import Gradients, Projection
from .recompute import recomputed_gradients


Way = Literal["auto", "frozen", "forecast", "recompute"]

# A row counts as forecast when its gradient is within this of the forecast, relative to its own size: some roundings
# of float32, and far below the 1e-5 that parity allows.
FORECAST_RTOL = 4e-6
# Where a row's terms cancel, policy against KL, their rounding remains: it is measured by the rows' usual size
FORECAST_ATOL = 5e-7

# Rows of a chunk whose products leave few processors idle in their last wave, measured on one H200 at hidden sizes 1024
# and 4096 (benchmarks/NOTES.md): others take up to a sixth longer for the same work. Larger chunks are multiples of the
# first, smaller ones take what fits
_HEIGHTS = (4096, 3072, 2048, 1024, 768, 512, 256, 128)


class Forecast(Protocol):
    """
    Says which gradient each row will receive. Right or wrong, the gradients come out right; wrong rows cost time.

    Called once per chunk with the rows as a slice, their log-probabilities `[n]` and entropies `[n]`, both detached; it
    returns the gradients with respect to both, `[n]` each (the second may be `None`), up to one common factor. Rows
    from `live_rows` on are known to receive none.
    """

    live_rows: int

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass
class FusedStats:
    """What the last call did: its way, the rows it projected, and those its backward had to recompute."""

    way: str = ""
    rows: int = 0
    recomputed: int = 0


@dataclass(frozen=True)
class _Call:
    """Everything one call needs besides tensors."""

    way: str
    transform: LogitTransform
    compute_dtype: torch.dtype
    chunk_rows: int
    forecast: Forecast | None
    entropy: bool
    stats: FusedStats


def choose_way(head_needs_grad: bool, forecast: Forecast | None, entropy_grad: bool) -> str:
    """
    Return the cheapest of the three ways: `"frozen"` (2 GEMMs), `"forecast"` (3), `"recompute"` (1 + 3 x the fraction
    of rows with gradient). The frozen way prepays the gradient of the log-probabilities only.
    """
    if not head_needs_grad and not entropy_grad:
        return "frozen"
    return "recompute" if forecast is None else "forecast"


def rows_per_chunk(vocab_size: int, itemsize: int, logits_mib: float) -> int:
    """Return how many rows of logits fit into `logits_mib` MiB, at one of the heights that the products like."""
    rows = max(1, int(logits_mib * 2**20) // (vocab_size * itemsize))
    return rows // _HEIGHTS[0] * _HEIGHTS[0] or next((height for height in _HEIGHTS if height <= rows), rows)


def default_logits_mib(hidden: Tensor, head: LMHead, way: str, compute_dtype: torch.dtype) -> float:
    """
    Return the size of the chunk of logits, in MiB, at which the peak of memory stays below that of TRL's fused head.

    Outside CUDA a chunk should stay in cache. On CUDA the logits may take the 256 MiB of TRL's tile, the room of what
    is cast at the end (the weight's gradient), and of what only TRL holds in float32 (the hidden states' gradient).
    """
    if hidden.device.type != "cuda":
        return 16
    size = 256 * 2**20
    if way in ("frozen", "forecast") and hidden.dtype == compute_dtype:
        size += 4 * hidden.numel()
    if way == "forecast" and head.weight.dtype == compute_dtype:
        size += head.weight.numel() * head.weight.itemsize
    return size / 2**20


def fused_linear_logps(
    hidden: Tensor,
    head: LMHead,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    forecast: Forecast | None = None,
    way: Way = "auto",
    logits_mib: float | None = None,
    entropy: bool = True,
    entropy_grad: bool = False,
    stats: FusedStats | None = None,
) -> tuple[Tensor, Tensor | None]:
    """
    Log-probability of each target and entropy of each row under `softmax(head(hidden) / temperature)`.

    The head is projected a chunk of rows at a time. Both outputs are differentiable once with respect to `hidden` and
    the head's weight, bias and low-rank terms.

    Args:
        hidden (`Tensor`):
            Hidden states, shape `[N, H]`.
        head (`LMHead`):
            The output projection.
        targets (`Tensor`):
            Token ids, shape `[N]`, int64, each in `[0, V)`.
        temperature (`float` or `Tensor`, *optional*, defaults to `1.0`):
            Sampling temperature, one for all rows or one for each, shape `[N]`.
        forecast ([`Forecast`], *optional*):
            The gradient each row is expected to receive. With a right one no row is projected twice.
        way (`str`, *optional*, defaults to `"auto"`):
            `"frozen"`, `"forecast"` or `"recompute"` force a way; `"auto"` asks [`choose_way`].
        logits_mib (`float`, *optional*):
            Size of the chunk of logits, in MiB. Defaults to [`default_logits_mib`].
        entropy (`bool`, *optional*, defaults to `True`):
            Whether to compute the entropies.
        entropy_grad (`bool`, *optional*, defaults to `False`):
            Whether the entropies will receive a gradient. A gradient that was not announced is right too, but costs a
            recomputation.
        stats ([`FusedStats`], *optional*):
            Filled in by the call and its backward.

    Returns:
        `tuple[Tensor, Tensor | None]`:
            Log-probabilities and entropies in nats, shape `[N]` each, float32 (float64 for float64 heads).

    Raises:
        `ValueError`: when shapes do not fit or `way` forces what the arguments cannot do.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"expected hidden [N, H], targets [N] and a head of weight [V, H]; got {list(hidden.shape)}, "
            f"{list(targets.shape)} and {list(head.weight.shape)}"
        )
    device_type = hidden.device.type
    compute_dtype = head.weight.dtype
    if torch.is_autocast_enabled(device_type) and not head.fp32:
        compute_dtype = torch.get_autocast_dtype(device_type)

    hidden, up, bias, temperature = head.operands(hidden, temperature)  # [N, H + r], [V, r], [V]
    head_needs_grad = any(t is not None and t.requires_grad for t in (head.weight, bias, up))
    if not torch.is_grad_enabled() or not (hidden.requires_grad or head_needs_grad):
        resolved = "no_grad"
    else:
        resolved = choose_way(head_needs_grad, forecast, entropy_grad) if way == "auto" else way
    if resolved == "frozen" and head_needs_grad:
        raise ValueError('way="frozen" needs a head without trainable parameters; use way="auto" or freeze the head')
    if resolved == "forecast" and forecast is None:
        raise ValueError('way="forecast" needs a forecast; pass one or use way="auto"')

    if logits_mib is None:
        logits_mib = default_logits_mib(hidden, head, resolved, compute_dtype)
    stats = FusedStats() if stats is None else stats
    stats.way, stats.rows, stats.recomputed = resolved, hidden.shape[0], 0
    call = _Call(
        way=resolved,
        transform=LogitTransform(head.logit_scale, head.softcap, temperature),
        compute_dtype=compute_dtype,
        chunk_rows=rows_per_chunk(head.weight.shape[0], compute_dtype.itemsize, logits_mib),
        forecast=forecast,
        entropy=entropy or entropy_grad,
        stats=stats,
    )
    with torch.autocast(device_type, enabled=False):
        logps, entropies = FusedLinearLogProb.apply(hidden, head.weight, bias, up, targets, call)
    return logps, entropies


class FusedLinearLogProb(torch.autograd.Function):
    """
    One node from hidden states to log-probabilities and entropies. The forward prepays a gradient where it can; the
    backward scales what was prepaid and recomputes the rows whose true gradient is another.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, up: Tensor | None, targets: Tensor, call: _Call
    ):
        # Entropies often feed a metric only: without this their gradient would arrive as zeros
        ctx.set_materialize_grads(False)
        work = Projection(hidden, weight, bias, up, targets, call.transform, call.compute_dtype, call.chunk_rows)
        logps, lse = work.new_rows(), work.new_rows()  # [N]
        entropies = work.new_rows() if call.entropy else None  # [N]

        prepaid = None
        live_rows = len(targets)
        if call.way in ("frozen", "forecast"):
            live_rows = len(targets) if call.forecast is None else call.forecast.live_rows
            gradients = Gradients(work, ctx.needs_input_grad)
            prepaid = _Prepaid(work.new_rows().zero_(), None, gradients, live_rows == len(targets))
        for rows in work.chunks(live_rows):
            logits = work.project(rows)  # [n, V]
            row_entropies = None if entropies is None else entropies[rows]
            work.kernels.fold(logits, targets[rows], call.transform, logps[rows], lse[rows], row_entropies)
            if prepaid is not None and rows.start < live_rows:
                prepaid = _prepay(prepaid, call, rows, logps[rows], row_entropies)
                row_grads = prepaid.logps[rows], None if prepaid.entropies is None else prepaid.entropies[rows]
                prepaid.gradients.add(rows, logits, lse[rows], row_entropies, *row_grads)

        work.release()
        ctx.call, ctx.prepaid = call, prepaid
        ctx.save_for_backward(hidden, weight, bias, up, targets, lse, entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps: Tensor | None, grad_entropies: Tensor | None):
        hidden, weight, bias, up, targets, lse, entropies = ctx.saved_tensors
        # A second backward through a retained graph finds nothing prepaid and recomputes
        call, prepaid, ctx.prepaid = ctx.call, ctx.prepaid, None

        work = Projection(hidden, weight, bias, up, targets, call.transform, call.compute_dtype, call.chunk_rows)
        grad_logps = torch.zeros_like(lse) if grad_logps is None else grad_logps.to(lse.dtype)  # [N]
        if prepaid is None:
            rows = _Unpaid(grad_logps, grad_entropies).rows()  # [M]
            call.stats.recomputed = len(rows)
            needs = ctx.needs_input_grad
            return *recomputed_gradients(work, rows, lse, entropies, grad_logps, grad_entropies, needs), None, None

        gradients = prepaid.gradients
        settle = _settle_frozen if call.way == "frozen" else _settle_forecast
        unpaid = settle(prepaid, grad_logps, grad_entropies)
        rows = None if unpaid is None else unpaid.rows()  # [M]
        call.stats.recomputed = 0 if rows is None else len(rows)
        for index in rows.split(call.chunk_rows) if call.stats.recomputed else ():
            row_grads = unpaid.logps[index], None if unpaid.entropies is None else unpaid.entropies[index]
            row_entropies = None if entropies is None else entropies[index]
            gradients.add(index, work.project(index), lse[index], row_entropies, *row_grads)
        work.release()
        return *gradients.finish(), None, None


class _Prepaid(NamedTuple):
    """What the forward assumed each row's gradient to be, and the gradients it built from that."""

    logps: Tensor  # [N]
    entropies: Tensor | None  # [N]
    gradients: Gradients
    of_all_rows: bool


class _Unpaid(NamedTuple):
    """The part of each row's gradient that has not gone into the parameters' gradients yet."""

    logps: Tensor  # [N]
    entropies: Tensor | None  # [N]

    def rows(self) -> Tensor:
        """Indices of the rows with something left, NaN included, `[M]`. Synchronises the device once."""
        open_rows = self.logps != 0
        if self.entropies is not None:
            open_rows |= self.entropies != 0
        return open_rows.nonzero().squeeze(-1)


def _prepay(prepaid: _Prepaid, call: _Call, rows: slice, logps: Tensor, entropies: Tensor | None) -> _Prepaid:
    """Write down what the gradient of `rows` is assumed to be."""
    if call.way == "frozen":
        prepaid.logps[rows] = 1.0  # backward multiplies by the true gradient
        return prepaid
    expected_logps, expected_entropies = call.forecast(rows, logps, entropies)
    prepaid.logps[rows] = expected_logps
    if expected_entropies is not None:
        if prepaid.entropies is None:
            prepaid = prepaid._replace(entropies=torch.zeros_like(prepaid.logps))
        prepaid.entropies[rows] = expected_entropies
    return prepaid


def _settle_frozen(prepaid: _Prepaid, grad_logps: Tensor, grad_entropies: Tensor | None) -> _Unpaid | None:
    """Multiply each row's unit gradient by its true one. Rows thought dead and any entropy gradient remain."""
    prepaid.gradients.scale_rows(grad_logps)
    if prepaid.of_all_rows and grad_entropies is None:
        return None  # without asking the device
    return _Unpaid(torch.where(prepaid.logps == 0, grad_logps, 0.0), grad_entropies)


def _settle_forecast(prepaid: _Prepaid, grad_logps: Tensor, grad_entropies: Tensor | None) -> _Unpaid | None:
    """
    Scale what was prepaid to the true gradient. The two differ by one common factor (gradient accumulation, a loss
    scaler, a distributed average), estimated here; rows that differ by more remain with the difference.
    """
    factor = _common_factor(grad_logps, prepaid.logps)
    true, paid = [grad_logps], [factor * prepaid.logps]
    if grad_entropies is not None or prepaid.entropies is not None:
        zeros = torch.zeros_like(grad_logps)
        true.append(zeros if grad_entropies is None else grad_entropies.to(zeros.dtype))
        paid.append(zeros if prepaid.entropies is None else factor * prepaid.entropies)
    true, paid = torch.stack(true), torch.stack(paid)  # [1 or 2, N]

    usual = true.square().mean(-1, keepdim=True).sqrt()
    usual = torch.where(usual.isfinite(), usual, 0.0)
    tolerance = FORECAST_RTOL * true.abs() + FORECAST_ATOL * usual
    wrong = ~((true - paid).abs() <= tolerance).all(0)  # [N]; NaN is wrong
    # Correcting by a difference loses digits when more was wrongly paid than is due: then start from nothing
    keep = torch.linalg.vector_norm(paid * wrong) <= torch.linalg.vector_norm(true)
    keep, factor, any_wrong = torch.stack([keep.double(), factor.double(), wrong.any().double()]).tolist()
    if keep:
        prepaid.gradients.scale(factor)
        if not any_wrong:
            return None
        left = torch.where(wrong, true - paid, 0.0)
    else:
        prepaid.gradients.reset()
        left = true
    return _Unpaid(left[0], left[1] if len(left) == 2 else None)


def _common_factor(true: Tensor, expected: Tensor) -> Tensor:
    """Median of `true / expected` over the rows where neither is zero, 1 where there is none; a scalar tensor."""
    known = (true != 0) & (expected != 0)
    factor = torch.where(known, true / expected, float("nan")).nanmedian() if len(true) else true.new_tensor(1.0)
    return torch.where(factor.isfinite(), factor, 1.0)
