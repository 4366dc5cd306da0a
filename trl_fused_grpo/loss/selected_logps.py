"""Log-probabilities of some positions of a micro-batch, each at its place in `[B, T]`."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.ops.chunk_size import default_group_mib
from trl_fused_grpo.ops.linear_logps import fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead

from .batch import as_columns, put_at
from .forecast import grad_rows_first


def head_of(weight: Tensor | LMHead, bias: Tensor | None) -> LMHead:
    """The head that a caller gives: an [`LMHead`], or a weight `[V, H]` and a bias `[V]`."""
    if not isinstance(weight, LMHead):
        return LMHead(weight, bias)
    if bias is not None:
        raise ValueError("An LMHead holds the bias: leave out the one beside it.")
    return weight


def selected_logps(
    token_ids: Tensor,  # [B, T], int64
    temperature: float | Tensor,  # one for all tokens, or `[B]`, `[B, 1]` or `[B, T]`
    hidden: Tensor,  # [B, T, H], each the hidden state that predicts the token at its place
    head: LMHead,
    positions: Tensor,  # [N], in the order of the forecast's rows
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies `[B, T]` at the flat `positions`, zero elsewhere."""
    if isinstance(temperature, Tensor):
        temperature = as_columns(temperature).expand(token_ids.shape).flatten().index_select(0, positions)  # [N]
    rows = hidden.flatten(0, -2)  # [B * T, H]
    forecast = options.get("forecast")
    is_sorted = forecast is None or forecast.grad_rows in (0, len(positions))
    if len(positions) < len(rows) or not is_sorted:  # all rows in their own order need no copy
        rows = rows.index_select(0, positions)  # [N, H]
    targets = token_ids.flatten().index_select(0, positions)  # [N]
    if options.get("logits_mib") is None:
        options["group_mib"] = default_group_mib(rows.shape[1], token_ids.numel())
    logps, entropies = fused_linear_logps(rows, head, targets, temperature, **options)  # [N]
    shape = token_ids.shape
    return put_at(positions, logps, shape), None if entropies is None else put_at(positions, entropies, shape)


@torch.no_grad()
def reference_logps(
    logps: Tensor | None,  # [B, T], nats
    hidden: Tensor | None,  # [B, T, H]
    weight: Tensor | LMHead | None,  # what [`head_of`] takes
    bias: Tensor | None,
    selected: Tensor,  # bool `[B, T]`, the positions to compute
    logps_of: Callable[..., tuple[Tensor, Tensor | None]],  # [`selected_logps`] with token ids and temperature
) -> Tensor:
    """Log-probabilities of the reference `[B, T]`: those given, or else computed from its hidden states and head."""
    if logps is not None:
        if hidden is not None:
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.", stacklevel=3
            )
        return logps
    if hidden is None or weight is None:
        raise ValueError("use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight.")
    positions, _ = grad_rows_first(selected, None)
    return logps_of(hidden, head_of(weight, bias), positions, entropy=False)[0]
