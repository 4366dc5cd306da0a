"""Metrics of one micro-batch, and the output that carries them."""

from typing import NamedTuple

from torch import Tensor

from .batch import GRPOBatch
from .objective import CLIPPED_LOSSES, GRPOObjective, TokenTerms


class GRPOLossOutput(NamedTuple):
    """
    What [`FusedLinearGRPOLoss`] returns with `return_outputs=True`.

    Args:
        loss (`Tensor`): scalar, differentiable.
        per_token_logps, entropies (`Tensor`): `[B, T]`, nats, without gradient; zero where the mask is zero.
        metrics (`dict[str, Tensor]`): means over the tokens of this call, under TRL's names where TRL has one.
    """

    loss: Tensor
    per_token_logps: Tensor
    entropies: Tensor
    metrics: dict[str, Tensor]


def named_metrics(
    objective: GRPOObjective, batch: GRPOBatch, terms: TokenTerms, entropies: Tensor | None
) -> dict[str, Tensor]:
    """
    Scalars that describe one micro-batch, without gradient, by name. Nothing is summed over processes.

    A token is clipped by its ratio before `delta` bounds it, as in Liger.
    """
    mask = batch.mask  # [B, T]

    def mean(values: Tensor) -> Tensor:
        return (values.detach() * mask).sum() / mask.sum().clamp(min=1.0)

    low = high = terms.ratio < 0  # never, for losses that clip nothing
    if objective.loss_type in CLIPPED_LOSSES:
        low = (terms.ratio < 1 - objective.epsilon_low) & (batch.advantages < 0)
        high = (terms.ratio > 1 + objective.epsilon_high) & (batch.advantages > 0)
    elif objective.loss_type == "cispo":
        high = (terms.ratio > objective.epsilon_high) & (batch.advantages > 0)
    metrics = {
        "clip_ratio/low_mean": mean(low),
        "clip_ratio/high_mean": mean(high),
        "clip_ratio/region_mean": mean(low | high),
    }
    if objective.loss_type == "cispo":
        metrics = {"cispo_clip_ratio": mean(high)}
    if objective.beta != 0.0:
        metrics["kl"] = mask.new_zeros(()) if terms.kl is None else mean(terms.kl)
    if terms.phi is not None:
        is_per_sequence = terms.phi.shape[1] == 1
        metrics["vespo/phi_seq_mean"] = terms.phi.sum() / max(len(mask), 1) if is_per_sequence else mean(terms.phi)
    if entropies is not None:
        metrics["entropy"] = mean(entropies)
    return metrics
