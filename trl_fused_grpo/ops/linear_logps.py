"""
Log-probabilities and entropies of a linear head without a `[N, V]` tensor of logits, and their gradients.

[`fused_linear_logps`] computes the logits of a chunk of rows, takes a few numbers of each row, and reuses the memory.
Gradients need the logits once more: the backward mode `"recompute"` computes them a second time in backward. The modes
`"forecast"` and `"frozen"` turn a chunk into gradients in forward instead, while its logits are in memory.
`"forecast"` assumes the row gradients that a [`Forecast`] expects, and backward recomputes the rows that differ.
`"frozen"`, for a head without gradient, assumes one for every row and multiplies by the true row gradient in backward.

Read on in `chunked_linear.py` (the GEMMs), `precomputed_grads.py` (the comparison in backward), `recompute.py` (logits
a second time) and `kernels/torch.py` (from logits to log-probabilities and gradients).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .block_forward import RowValues, run_block
from .chunk_size import default_logits_mib
from .chunked_linear import ChunkedLinear, GradAccumulator
from .forecast import Forecast, groups_of
from .kernels import LogitTransform
from .lm_head import LMHead
from .precomputed_grads import PrecomputedGrads, ResidualGrads
from .recompute import recomputed_gradients
from .row_blocks import RowBlock, RowLimits, plan_blocks, rows_without_assumption


# Backward modes, see `choose_backward`
Backward = Literal["auto", "frozen", "forecast", "recompute"]


@dataclass
class FusedStats:
    """
    What the last call of [`fused_linear_logps`] did.

    Args:
        backward (`str`): backward mode, `"no_grad"` for a call without gradient.
        rows (`int`): rows whose log-probabilities were computed.
        recomputed (`int`): rows whose logits its backward computed a second time.
        layout (`str`): in a trainer, how sequences were laid out in the model's rows.
        leaves_cudnn_off (`bool`): in a trainer, whether the backward must not take cuDNN's attention.
        leaves_out (`bool`): in a trainer, whether sequences that can receive no gradient were left out.
    """

    backward: str = ""
    rows: int = 0
    recomputed: int = 0
    layout: str = ""
    leaves_cudnn_off: bool = False
    leaves_out: bool = False


@dataclass(frozen=True)
class _Params:
    """Everything that the autograd function needs besides tensors."""

    backward: str
    transform: LogitTransform
    compute_dtype: torch.dtype
    chunk_rows: int
    forecast: Forecast | None
    blocks: list[RowBlock]
    entropy: bool
    stats: FusedStats

    def linear(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_b: Tensor | None, targets: Tensor
    ) -> ChunkedLinear:
        return ChunkedLinear(hidden, weight, bias, lora_b, targets, self.transform, self.compute_dtype, self.chunk_rows)

    def assumed_grads(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradients `[n]` that the forward assumes: those of the forecast, or one, to be multiplied later."""
        if self.backward == "forecast" and self.forecast is not None:
            return self.forecast(rows, logps, entropies)
        return torch.ones_like(logps), None


def choose_backward(head_needs_grad: bool, forecast: Forecast | None, entropy_grad: bool) -> str:
    """
    Return the cheapest backward mode that is possible.

    Over all rows, `"frozen"` takes 2 GEMMs, `"forecast"` 3, and `"recompute"` 1 + 3 x the fraction of rows that have a
    gradient. `"frozen"` precomputes the gradient of the log-probabilities only, not that of the entropies.
    """
    if not head_needs_grad and not entropy_grad:
        return "frozen"
    return "recompute" if forecast is None else "forecast"


def fused_linear_logps(
    hidden: Tensor,
    head: LMHead,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    forecast: Forecast | None = None,
    backward: Backward = "auto",
    logits_mib: float | None = None,
    group_mib: float | None = None,
    entropy: bool = True,
    entropy_grad: bool = False,
    stats: FusedStats | None = None,
    head_grad: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """
    Log-probability of each target and entropy of each row under `softmax(head(hidden) / temperature)`.

    Logits exist for a chunk of rows at a time. Both outputs are differentiable once with respect to `hidden` and the
    head's weight, bias and low-rank terms.

    ```python
    import torch
    from trl_fused_grpo import LMHead, fused_linear_logps

    hidden, head = torch.randn(7, 16, requires_grad=True), LMHead(torch.randn(100, 16))
    logps, entropies = fused_linear_logps(hidden, head, torch.randint(100, (7,)))
    logps.mean().backward()
    ```

    Args:
        hidden (`Tensor`):
            Hidden states, shape `[N, H]`.
        head (`LMHead`):
            The head, its scale and its softcap.
        targets (`Tensor`):
            Token ids, shape `[N]`, int64, each in `[0, V)`.
        temperature (`float` or `Tensor`, *optional*, defaults to `1.0`):
            Sampling temperature: one for all rows, or one for each row, shape `[N]`.
        forecast ([`Forecast`], *optional*):
            The gradient that each row is expected to receive. With a right one no logits are computed twice.
        backward (`str`, *optional*, defaults to `"auto"`):
            Backward mode: `"frozen"`, `"forecast"`, `"recompute"`, or `"auto"` for that of [`choose_backward`].
        logits_mib (`float`, *optional*):
            Size of the chunk of logits, in MiB. Defaults to [`default_logits_mib`].
        group_mib (`float`, *optional*):
            Memory that the groups of a forecast may take instead, in MiB: for the logits of a whole group, or for a
            second gradient of the head. Defaults to that of a chunk. See `row_blocks.py`.
        entropy (`bool`, *optional*, defaults to `True`):
            Whether to compute the entropies.
        entropy_grad (`bool`, *optional*, defaults to `False`):
            Whether the entropies will receive a gradient. Their gradient is right without it too, but then the rows'
            logits are computed twice.
        stats ([`FusedStats`], *optional*):
            Filled in by forward and backward.
        head_grad (`bool`, *optional*):
            Take the chunks of a head with gradient, or of one without, whatever this one is. A reference with the
            policy's weights, and the structure of its forecast, then has the policy's values to the bit.

    Returns:
        `tuple[Tensor, Tensor | None]`:
            Log-probabilities and entropies in nats, shape `[N]` each, float32 (float64 for float64 heads).

    Raises:
        `ValueError`: when shapes do not fit, or the other arguments do not allow the backward mode.
    """
    _check_shapes(hidden, head, targets)
    device_type = hidden.device.type
    compute_dtype = head.weight.dtype
    if torch.is_autocast_enabled(device_type) and not head.fp32:
        compute_dtype = torch.get_autocast_dtype(device_type)

    inputs, lora_b, bias, common_temperature = head.linear_inputs(hidden, temperature)  # [N, H + r], [V, r], [V]
    head_needs_grad = any(t is not None and t.requires_grad for t in (head.weight, bias, lora_b))
    planned = backward
    if backward == "auto":
        planned = choose_backward(head_needs_grad if head_grad is None else head_grad, forecast, entropy_grad)
    needs_grad = torch.is_grad_enabled() and (inputs.requires_grad or head_needs_grad)
    resolved = planned if needs_grad else "no_grad"
    _check_backward(resolved, head_needs_grad, forecast)

    # With a forecast, chunks are as large without gradient as with it: the same values then, to the bit
    mode = resolved if forecast is None and head_grad is None else planned
    chunk_mib = default_logits_mib(inputs, head, mode, compute_dtype) if logits_mib is None else logits_mib
    vocab_size, itemsize = head.weight.shape[0], compute_dtype.itemsize
    head_grad_bytes = vocab_size * inputs.shape[1] * max(itemsize, 4)
    limits = RowLimits.of(vocab_size, itemsize, chunk_mib, group_mib, head_grad_bytes)
    grad_rows = len(targets) if forecast is None or planned == "recompute" else forecast.grad_rows
    groups = groups_of(forecast) if planned == "forecast" else None
    blocks = plan_blocks(len(targets), grad_rows, groups, limits)
    if backward == "auto" and rows_without_assumption(blocks, grad_rows) > grad_rows / 2:
        # Tiles of the vocabulary take less time than a residual of so many rows
        options = (logits_mib, None, entropy, entropy_grad, stats, head_grad)
        return fused_linear_logps(hidden, head, targets, temperature, forecast, "recompute", *options)
    stats = FusedStats() if stats is None else stats
    stats.backward, stats.rows, stats.recomputed = resolved, len(targets), 0
    params = _Params(
        backward=resolved,
        transform=LogitTransform(head.logit_scale, head.softcap, common_temperature),
        compute_dtype=compute_dtype,
        chunk_rows=limits.chunk,
        forecast=forecast,
        blocks=blocks,
        entropy=entropy or entropy_grad,
        stats=stats,
    )
    with torch.autocast(device_type, enabled=False):
        logps, entropies = FusedLinearLogProb.apply(inputs, head.weight, bias, lora_b, targets, params)
    return logps, entropies


def _check_shapes(hidden: Tensor, head: LMHead, targets: Tensor) -> None:
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"expected hidden [N, H], targets [N] and a head of weight [V, H]; got {list(hidden.shape)}, "
            f"{list(targets.shape)} and {list(head.weight.shape)}"
        )


def _check_backward(backward: str, head_needs_grad: bool, forecast: Forecast | None) -> None:
    if backward == "frozen" and head_needs_grad:
        raise ValueError(
            'backward="frozen" needs a head without trainable parameters; use backward="auto" or freeze the head'
        )
    if backward == "forecast" and forecast is None:
        raise ValueError('backward="forecast" needs a forecast; pass one or use backward="auto"')


class FusedLinearLogProb(torch.autograd.Function):
    """
    One autograd node from hidden states to log-probabilities and entropies.

    The forward accumulates gradients from the row gradients that it assumes, where the backward mode has any. The
    backward compares these with the true ones and recomputes the rows that differ.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [N, H + r]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        lora_b: Tensor | None,  # [V, r]
        targets: Tensor,  # [N]
        params: _Params,
    ):
        # Entropies often feed a metric only: without this their gradient would arrive as zeros
        ctx.set_materialize_grads(False)
        linear = params.linear(hidden, weight, bias, lora_b, targets)
        values = RowValues.empty(linear, params.entropy)  # [N] each
        precomputed = None
        if params.backward in ("frozen", "forecast"):
            accumulator = GradAccumulator(linear, ctx.needs_input_grad)
            includes_all_rows = all(block.assumes != "none" for block in params.blocks)
            precomputed = PrecomputedGrads(accumulator, includes_all_rows)
        for block in params.blocks:
            run_block(block, linear, values, precomputed, params.assumed_grads)
        linear.release()
        logps, lse, entropies = values
        ctx.params, ctx.precomputed = params, precomputed
        ctx.save_for_backward(hidden, weight, bias, lora_b, targets, lse, entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps: Tensor | None, grad_entropies: Tensor | None):
        hidden, weight, bias, lora_b, targets, lse, entropies = ctx.saved_tensors
        # A second backward through a retained graph finds nothing precomputed and recomputes
        params, precomputed, ctx.precomputed = ctx.params, ctx.precomputed, None
        linear = params.linear(hidden, weight, bias, lora_b, targets)
        grad_logps = torch.zeros_like(lse) if grad_logps is None else grad_logps.to(lse.dtype)  # [N]
        if precomputed is None:
            rows = ResidualGrads(grad_logps, grad_entropies).rows()  # [M]
            params.stats.recomputed = len(rows)
            needs = ctx.needs_input_grad
            return *recomputed_gradients(linear, rows, lse, entropies, grad_logps, grad_entropies, needs), None, None

        is_frozen = params.backward == "frozen"
        resolve = precomputed.resolve_unit_grads if is_frozen else precomputed.resolve_forecast_grads
        residual = resolve(grad_logps, grad_entropies)
        params.stats.recomputed = 0
        if residual is not None:
            params.stats.recomputed = _add_residual(residual, linear, precomputed.accumulator, lse, entropies)
        return *precomputed.accumulator.finish(), None, None


def _add_residual(
    residual: ResidualGrads, linear: ChunkedLinear, accumulator: GradAccumulator, lse: Tensor, entropies: Tensor | None
) -> int:
    """Compute logits of the rows with a residual gradient again, add their gradients, and return how many these are."""
    rows = residual.rows()  # [M]
    for index in rows.split(linear.chunk_rows) if len(rows) else ():
        row_entropies = None if entropies is None else entropies[index]  # [n]
        grad_entropies = None if residual.entropies is None else residual.entropies[index]  # [n]
        logits = linear.compute_logits(index)  # [n, V]
        accumulator.add(index, logits, lse[index], row_entropies, residual.logps[index], grad_entropies)
    linear.release()
    return len(rows)
