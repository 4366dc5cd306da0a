"""Log-probabilities and entropies of a linear head without a `[N, V]` tensor of logits, and their gradients."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunked_linear import ChunkedLinear, GradAccumulator
from .kernels import LogitTransform
from .lm_head import LMHead
from .precomputed_grads import PrecomputedGrads, ResidualGrads
from .recompute import recomputed_gradients


Backward = Literal["auto", "frozen", "forecast", "recompute"]

# Rows of a chunk whose products leave few processors idle in their last wave, measured on one H200 at hidden sizes 1024
# and 4096 (benchmarks/NOTES.md): others take up to a sixth longer for the same work. Larger chunks are multiples of
# the first, smaller ones take what fits
_HEIGHTS = (4096, 3072, 2048, 1024, 768, 512, 256, 128)


class Forecast(Protocol):
    """
    Says which gradient each row will receive. Right or wrong, the gradients come out right; wrong rows cost time.

    Called once per chunk with the rows as a slice, their log-probabilities `[n]` and entropies `[n]`, both detached; it
    returns the gradients with respect to both, `[n]` each (the second may be `None`), up to one common factor. Rows
    from `grad_rows` on are known to receive none.
    """

    @property
    def grad_rows(self) -> int: ...

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


@dataclass
class FusedStats:
    """
    What the last call did: its way, the rows it projected, those its backward had to recompute, and, in a trainer, how
    the model's rows were laid out.
    """

    backward: str = ""
    rows: int = 0
    recomputed: int = 0
    layout: str = ""


@dataclass(frozen=True)
class _Call:
    """Everything one call needs besides tensors."""

    backward: str
    transform: LogitTransform
    compute_dtype: torch.dtype
    chunk_rows: int
    forecast: Forecast | None
    grad_rows: int
    entropy: bool
    stats: FusedStats


def choose_backward(head_needs_grad: bool, forecast: Forecast | None, entropy_grad: bool) -> str:
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


def default_logits_mib(hidden: Tensor, head: LMHead, backward: str, compute_dtype: torch.dtype) -> float:
    """
    Return the size of the chunk of logits, in MiB, at which the peak of memory stays below that of TRL's fused head.

    Outside CUDA a chunk should stay in cache. On CUDA the logits may take the 256 MiB of TRL's tile, the room of what
    is cast at the end (the weight's gradient), and of what only TRL holds in float32 (the hidden states' gradient).
    The copy of float32 weights that autocast asks for comes on top, up to 0.18 of TRL's peak.
    """
    if hidden.device.type != "cuda":
        return 16
    size = 256 * 2**20
    if backward in ("frozen", "forecast") and hidden.dtype == compute_dtype:
        size += 4 * hidden.numel()
    if backward == "forecast" and head.weight.dtype == compute_dtype:
        size += head.weight.numel() * head.weight.itemsize
    return size / 2**20


def fused_linear_logps(
    hidden: Tensor,
    head: LMHead,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    forecast: Forecast | None = None,
    backward: Backward = "auto",
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
        backward (`str`, *optional*, defaults to `"auto"`):
            `"frozen"`, `"forecast"` or `"recompute"` force a way; `"auto"` asks [`choose_backward`].
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
        `ValueError`: when shapes do not fit or `backward` forces what the arguments cannot do.
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

    hidden, lora_b, bias, temperature = head.operands(hidden, temperature)  # [N, H + r], [V, r], [V]
    head_needs_grad = any(t is not None and t.requires_grad for t in (head.weight, bias, lora_b))
    planned = choose_backward(head_needs_grad, forecast, entropy_grad) if backward == "auto" else backward
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head_needs_grad)
    resolved = planned if needs_grad else "no_grad"
    if resolved == "frozen" and head_needs_grad:
        raise ValueError(
            'backward="frozen" needs a head without trainable parameters; use backward="auto" or freeze the head'
        )
    if resolved == "forecast" and forecast is None:
        raise ValueError('backward="forecast" needs a forecast; pass one or use backward="auto"')

    if logits_mib is None:
        # With a forecast as with gradient: the reference's log-probs are then those of an equal policy, to the bit
        sized_as = resolved if forecast is None else planned
        logits_mib = default_logits_mib(hidden, head, sized_as, compute_dtype)
    stats = FusedStats() if stats is None else stats
    stats.backward, stats.rows, stats.recomputed = resolved, hidden.shape[0], 0
    call = _Call(
        backward=resolved,
        transform=LogitTransform(head.logit_scale, head.softcap, temperature),
        compute_dtype=compute_dtype,
        chunk_rows=rows_per_chunk(head.weight.shape[0], compute_dtype.itemsize, logits_mib),
        forecast=forecast,
        grad_rows=len(targets) if forecast is None or planned == "recompute" else forecast.grad_rows,
        entropy=entropy or entropy_grad,
        stats=stats,
    )
    with torch.autocast(device_type, enabled=False):
        logps, entropies = FusedLinearLogProb.apply(hidden, head.weight, bias, lora_b, targets, call)
    return logps, entropies


class FusedLinearLogProb(torch.autograd.Function):
    """
    One node from hidden states to log-probabilities and entropies. The forward prepays a gradient where it can; the
    backward scales what was precomputed and recomputes the rows whose true gradient is another.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_b: Tensor | None, targets: Tensor, call: _Call
    ):
        # Entropies often feed a metric only: without this their gradient would arrive as zeros
        ctx.set_materialize_grads(False)
        linear = ChunkedLinear(
            hidden, weight, bias, lora_b, targets, call.transform, call.compute_dtype, call.chunk_rows
        )
        logps, lse = linear.new_rows(), linear.new_rows()  # [N]
        entropies = linear.new_rows() if call.entropy else None  # [N]

        precomputed, grad_rows = None, call.grad_rows
        if call.backward in ("frozen", "forecast"):
            precomputed = PrecomputedGrads(GradAccumulator(linear, ctx.needs_input_grad), grad_rows == len(targets))
        for rows in linear.chunks(grad_rows):
            logits = linear.project(rows)  # [n, V]
            row_entropies = None if entropies is None else entropies[rows]
            linear.kernels.logprob_forward(logits, targets[rows], call.transform, logps[rows], lse[rows], row_entropies)
            if precomputed is not None and rows.start < grad_rows:
                # A frozen head's rows each get a unit gradient, which backward multiplies by the true one
                if call.backward == "forecast" and call.forecast is not None:
                    expected = call.forecast(rows, logps[rows], row_entropies)
                else:
                    expected = torch.ones_like(logps[rows]), None
                row_grads = precomputed.record(rows, *expected)
                precomputed.gradients.add(rows, logits, lse[rows], row_entropies, *row_grads)

        linear.release()
        ctx.call, ctx.precomputed = call, precomputed
        ctx.save_for_backward(hidden, weight, bias, lora_b, targets, lse, entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps: Tensor | None, grad_entropies: Tensor | None):
        hidden, weight, bias, lora_b, targets, lse, entropies = ctx.saved_tensors
        # A second backward through a retained graph finds nothing precomputed and recomputes
        call, precomputed, ctx.precomputed = ctx.call, ctx.precomputed, None

        linear = ChunkedLinear(
            hidden, weight, bias, lora_b, targets, call.transform, call.compute_dtype, call.chunk_rows
        )
        grad_logps = torch.zeros_like(lse) if grad_logps is None else grad_logps.to(lse.dtype)  # [N]
        if precomputed is None:
            rows = ResidualGrads(grad_logps, grad_entropies).rows()  # [M]
            call.stats.recomputed = len(rows)
            needs = ctx.needs_input_grad
            return *recomputed_gradients(linear, rows, lse, entropies, grad_logps, grad_entropies, needs), None, None

        gradients = precomputed.gradients
        settle = precomputed.resolve_unit_grads if call.backward == "frozen" else precomputed.resolve_forecast_grads
        residual = settle(grad_logps, grad_entropies)
        rows = lse.new_empty(0, dtype=torch.long) if residual is None else residual.rows()  # [M]
        call.stats.recomputed = len(rows)
        for index in rows.split(call.chunk_rows) if residual is not None and len(rows) else ():
            row_grads = residual.logps[index], None if residual.entropies is None else residual.entropies[index]
            row_entropies = None if entropies is None else entropies[index]
            gradients.add(index, linear.project(index), lse[index], row_entropies, *row_grads)
        linear.release()
        return *gradients.finish(), None, None
