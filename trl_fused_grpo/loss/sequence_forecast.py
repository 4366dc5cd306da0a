"""
The forecast where a token's gradient depends on the log-probabilities of its sequence, and on no other sequence.

Such are the importance ratio of a sequence that comes from the training forward, sequence-level ratios, VESPO's weight
and the off-policy sequence mask. The fused head holds the logits of whole sequences ([`RowGroups`]). When their
log-probabilities exist, the loss of these sequences is computed as it will be later, and differentiated.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.ops.forecast import RowGroups

from .batch import GRPOBatch, put_at
from .importance_sampling import SamplingCorrection
from .objective import GRPOObjective, kl_reference, token_terms


@dataclass(frozen=True)
class SequenceForecast:
    """The forecast for all positions of a micro-batch."""

    objective: GRPOObjective  # the options of the loss
    batch: GRPOBatch
    weights: Tensor  # [B, T], the weight of each token, multiplied by `unit`
    entropy_grads: Tensor | None  # [B, T], gradient of the entropies, multiplied by `unit`
    unit: Tensor  # scale of the forecast against the true gradients, a power of two; a scalar tensor
    correction: SamplingCorrection | None = None

    @classmethod
    def joined(cls, parts: list["SequenceForecast"]) -> "SequenceForecast":
        """Concatenate the forecasts of several micro-batches of one accumulation window, brought to one scale."""
        unit = torch.stack([part.unit for part in parts]).min()
        entropy_grads = [part.entropy_grads * (unit / part.unit) for part in parts if part.entropy_grads is not None]
        return cls(
            parts[0].objective,
            _joined([part.batch for part in parts]),
            torch.cat([part.weights * (unit / part.unit) for part in parts]),
            torch.cat(entropy_grads) if entropy_grads else None,
            unit,
            parts[0].correction,
        )

    @property
    def needs_grad(self) -> Tensor:
        """Bool `[B, T]`, true at all positions of sequences that can receive a gradient."""
        batch, weighs = self.batch, self.weights != 0  # [B, T]
        needs_grad = weighs & (batch.advantages != 0)
        if batch.importance_sampling_ratio is not None and self.objective.loss_type != "vespo":
            needs_grad = needs_grad & (batch.importance_sampling_ratio != 0)
        if kl_reference(self.objective, batch) is not None:
            needs_grad = needs_grad | weighs
        if self.entropy_grads is not None:
            needs_grad = needs_grad | (self.entropy_grads != 0)
        return needs_grad.any(1, keepdim=True) & (batch.mask != 0)

    @property
    def has_equal_grads(self) -> bool:
        """Return `True` if all tokens of a sequence receive the same gradient, and their entropies none."""
        batch, is_vespo = self.batch, self.objective.loss_type == "vespo"
        ratio = batch.importance_sampling_ratio
        is_per_sequence = (
            batch.old_per_token_logps is None or is_vespo or self.objective.importance_sampling_level == "sequence"
        )
        has_token_ratio = ratio is not None and ratio.shape[1] > 1
        has_token_ratio |= self.correction is not None and not self.correction.is_per_sequence
        return (
            is_per_sequence
            and (is_vespo or not has_token_ratio)
            and batch.advantages.shape[1] == 1
            and self.entropy_grads is None
            and kl_reference(self.objective, batch) is None
        )

    def at(self, index: Tensor, grad_rows: int) -> "SequenceRowForecast":
        """
        Select the rows at the flat positions `index` `[N]`; those from `grad_rows` on need no gradient. The others hold
        all selected positions of their sequences, one sequence after the other. Synchronises the device.
        """
        index = index[:grad_rows]
        width = self.weights.shape[1]
        sequences, number, counts = torch.unique_consecutive(index // width, return_inverse=True, return_counts=True)
        groups = RowGroups(counts.cumsum(0).tolist(), self.has_equal_grads)
        entropy_grads = None if self.entropy_grads is None else self.entropy_grads[sequences]
        batch, weights = selected(self.batch, sequences), self.weights[sequences]
        chosen = replace(self, batch=batch, weights=weights, entropy_grads=entropy_grads)
        return SequenceRowForecast(chosen, grad_rows, groups, number * width + index % width)

    def gradients(self, sequences: slice, places: Tensor, logps: Tensor) -> Tensor:
        """The gradients `[n]` of the log-probabilities of some sequences, which stand at `places` in them `[k, T]`."""
        batch, weights = selected(self.batch, sequences), self.weights[sequences]  # [k, T]
        # As the trainer fills positions that are not projected
        base = torch.zeros_like(weights) if batch.old_per_token_logps is None else batch.old_per_token_logps
        leaf = base.to(logps.dtype).flatten().index_put((places,), logps).view(weights.shape)  # [k, T]
        if self.correction is not None:
            batch = replace(batch, importance_sampling_ratio=self._ratio(batch, leaf))
        with torch.enable_grad():
            leaf.requires_grad_()
            loss = (token_terms(self.objective, batch, leaf).loss * weights).sum()
            (grads,) = torch.autograd.grad(loss, leaf)
        return grads.flatten()[places]

    def _ratio(self, batch: GRPOBatch, logps: Tensor) -> Tensor:
        """The ratio of policy and sampler `[k, T]` or `[k, 1]` of some sequences, from their log-probabilities."""
        sampling_logps = batch.sampling_per_token_logps
        assert self.correction is not None and sampling_logps is not None, (
            "the ratio needs the sampler's log-probabilities"
        )
        return self.correction.ratio(logps, sampling_logps, batch.mask)


class SampledForecast(SequenceForecast):
    """
    A [`SequenceForecast`] where the policy is the old one and there is no KL term: the gradient of each token at ratio
    one, which is known beforehand, times the ratio of policy and sampler that its sequence has.
    """

    def at(self, index: Tensor, grad_rows: int) -> "SequenceRowForecast":
        rows = super().at(index, grad_rows)
        at_ratio_one = on_policy_gradient(self.objective, rows.forecast.batch, rows.forecast.weights)
        return replace(rows, forecast=replace(rows.forecast, weights=at_ratio_one))

    def gradients(self, sequences: slice, places: Tensor, logps: Tensor) -> Tensor:
        batch, at_ratio_one = selected(self.batch, sequences), self.weights[sequences]  # [k, T]
        ratio = self._ratio(batch, put_at(places, logps, at_ratio_one.shape))  # [k, 1]
        return (at_ratio_one * ratio).flatten()[places]


@dataclass(frozen=True)
class SequenceRowForecast:
    """A [`Forecast`] for the rows in the order in which the fused head takes them."""

    forecast: SequenceForecast  # of the sequences whose rows these are
    grad_rows: int  # rows from there on are expected to receive no gradient
    groups: RowGroups  # the rows of each sequence
    places: Tensor  # [grad_rows]: flat positions in `[groups, T]`

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        width = self.forecast.weights.shape[1]
        first, last = bisect_left(self.groups.ends, rows.start + 1), bisect_left(self.groups.ends, rows.stop) + 1
        places = self.places[rows] - first * width  # [n]
        grads, entropy_grads = self.forecast.gradients(slice(first, last), places, logps), self.forecast.entropy_grads
        return grads, None if entropy_grads is None else entropy_grads[first:last].flatten()[places]


def on_policy_gradient(objective: GRPOObjective, batch: GRPOBatch, weights: Tensor) -> Tensor:
    """Gradient of the policy term `[B, T]` at ratio one, where it is the same for any log-probability."""
    with torch.enable_grad():
        logps = torch.zeros_like(weights).requires_grad_()
        terms = token_terms(replace(objective, beta=0.0), batch, logps)
        return torch.autograd.grad((terms.loss * weights).sum(), logps)[0]


def selected(batch: GRPOBatch, sequences: Tensor | slice) -> GRPOBatch:
    """Some sequences `[k]` of a micro-batch. Its normalizers stay: they are in the weights already."""
    return replace(batch, **{name: values[sequences] for name, values in _per_sequence(batch).items()})


def _joined(batches: list[GRPOBatch]) -> GRPOBatch:
    names = _per_sequence(batches[0])
    joined: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    return replace(batches[0], **joined)


def _per_sequence(batch: GRPOBatch) -> dict[str, Tensor]:
    """The tensors of a micro-batch that have a row for each sequence, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor) and value.dim() > 1}
