"""
Forecasts the gradient that each row of the fused head will receive, from a GRPO objective and a micro-batch.

[`forecast`] makes a [`BatchForecast`] of all positions. The fused head computes only the positions that the loss reads,
those that need a gradient first ([`grad_rows_first`]). [`BatchForecast.at`] picks their numbers, and the
[`RowForecast`] that it returns gives the fused head the gradients of some rows as soon as their log-probabilities
exist: the loss of these rows is computed as it will be later, and differentiated. On-policy it need not be, as the
gradient is the same for any log-probability.

Most objectives give a token a gradient that depends on its own log-probability alone. Then rows come one by one. Under
the importance ratio of a sequence that comes from the training forward, sequence-level ratios, VESPO's weight and the
off-policy sequence mask it depends on the whole sequence, and the fused head holds the logits of whole sequences
([`RowGroups`]).

Read on in `objective.py` (the formulas), `reduction.py` (the weight of a token) and `ops/linear_logps.py` (who calls a
forecast).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.ops.forecast import RowGroups

from .batch import GRPOBatch
from .importance_sampling import SamplingCorrection
from .objective import GRPOObjective, kl_reference, policy_loss, token_terms
from .reduction import entropy_weights, token_weights


@dataclass(frozen=True)
class BatchForecast:
    """The forecast for all positions of a micro-batch."""

    objective: GRPOObjective  # the options of the loss
    batch: GRPOBatch
    unit: Tensor  # scale of the forecast against the true gradients, a power of two; a scalar tensor
    weights: Tensor  # [B, T], the weight of each token, multiplied by `unit`, as the next two
    entropy_grads: Tensor | None = None  # [B, T], gradient of the entropies; `None` without an entropy bonus
    on_policy: Tensor | None = None  # [B, T], gradient of the policy term; `None` where log-probabilities decide it
    correction: SamplingCorrection | None = None  # computes the ratio of policy and sampler
    by_token: bool = False  # whether a token's gradient depends on no other token's log-probability

    @classmethod
    def joined(cls, parts: list["BatchForecast"]) -> "BatchForecast":
        """Concatenate the forecasts of several micro-batches of one accumulation window, brought to one scale."""
        unit = torch.stack([part.unit for part in parts]).min()
        own = [{name: values * (unit / part.unit) for name, values in part._own.items()} for part in parts]
        batch = replace(parts[0].batch, **_joined([_of_batch(part.batch) for part in parts]))
        return replace(parts[0], batch=batch, unit=unit, **_joined(own))

    @property
    def _own(self) -> dict[str, Any]:
        """Its own tensors `[B, T]`, by name."""
        own = {"weights": self.weights, "entropy_grads": self.entropy_grads, "on_policy": self.on_policy}
        return {name: values for name, values in own.items() if values is not None}

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "BatchForecast":
        """The forecast with other rows. Normalizers of the batch stay: they are in the weights already."""
        batch = {name: change(values) for name, values in _of_batch(self.batch).items()}
        return replace(self, batch=replace(self.batch, **batch), **{n: change(v) for n, v in self._own.items()})

    def of(self, sequences: slice | Tensor) -> "BatchForecast":
        """The forecast for some sequences `[k]`."""
        return self._changed(lambda values: values[sequences])

    @property
    def needs_grad(self) -> Tensor:
        """Bool `[B, T]`, true where a position can receive a gradient, or another one of its sequence by sequence."""
        batch, weighs = self.batch, self.weights != 0  # [B, T]
        needs_grad = weighs & (batch.advantages != 0)
        if batch.importance_sampling_ratio is not None and self.objective.loss_type != "vespo":
            needs_grad = needs_grad & (batch.importance_sampling_ratio != 0)
        if kl_reference(self.objective, batch) is not None:
            needs_grad = needs_grad | weighs
        if self.entropy_grads is not None:
            needs_grad = needs_grad | (self.entropy_grads != 0)
        return needs_grad if self.by_token else needs_grad.any(1, keepdim=True) & (batch.mask != 0)

    @property
    def has_equal_grads(self) -> bool:
        """Return `True` if all tokens of a sequence receive the same gradient, and their entropies none."""
        batch, is_vespo = self.batch, self.objective.loss_type == "vespo"
        ratio = batch.importance_sampling_ratio
        is_per_sequence = (
            batch.old_per_token_logps is None or is_vespo or self.objective.importance_sampling_level != "token"
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

    def at(self, index: Tensor, grad_rows: int) -> "RowForecast":
        """
        Select the rows at the flat positions `index` `[N]`; those from `grad_rows` on need no gradient. By sequence the
        others hold all selected positions of their sequences, one sequence after the other, and the device is
        synchronised.
        """
        index, width = index[:grad_rows], self.weights.shape[1]
        if self.by_token:  # each is a sequence of its own
            rows = self._changed(lambda values: values.expand_as(self.weights).flatten()[index].unsqueeze(1))
            return RowForecast(rows, grad_rows, None, torch.arange(len(index), device=index.device))
        sequences, number, counts = torch.unique_consecutive(index // width, return_inverse=True, return_counts=True)
        groups = RowGroups(counts.cumsum(0).tolist(), self.has_equal_grads)
        return RowForecast(self.of(sequences), grad_rows, groups, number * width + index % width)

    def gradients(self, places: Tensor, logps: Tensor) -> Tensor:
        """The gradients `[n]` of log-probabilities, all that the loss reads, which stand at the flat `places`."""
        batch, grads = self.batch, self.on_policy  # [k, T]
        # As the trainer fills positions that are not projected
        base = torch.zeros_like(self.weights) if batch.old_per_token_logps is None else batch.old_per_token_logps
        leaf = (
            base.to(logps.dtype).expand_as(self.weights).flatten().index_put((places,), logps).view(self.weights.shape)
        )  # [k, T]
        if self.correction is not None:
            sampling_logps = batch.sampling_per_token_logps
            assert sampling_logps is not None, "the ratio needs the sampler's log-probabilities"
            ratio = self.correction.ratio(leaf, sampling_logps, batch.mask)  # [k, T] or `[k, 1]`
            batch = replace(batch, importance_sampling_ratio=ratio)
            grads = None if grads is None else grads * ratio
        if grads is None or kl_reference(self.objective, batch) is not None:
            with torch.enable_grad():
                terms = token_terms(self.objective, batch, leaf.requires_grad_())
                loss = terms.loss if grads is None or terms.kl is None else self.objective.beta * terms.kl
                (others,) = torch.autograd.grad((loss * self.weights).sum(), leaf)
            grads = others if grads is None else grads + others
        return grads.flatten()[places]


@dataclass(frozen=True)
class RowForecast:
    """A [`Forecast`] for the rows in the order in which the fused head takes them."""

    forecast: BatchForecast  # of the sequences whose rows these are; by token each is one
    grad_rows: int
    groups: RowGroups | None  # the rows of each sequence; `None` by token
    places: Tensor  # [grad_rows]: flat positions in `[sequences, T]`

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sequences = rows
        if self.groups is not None:
            ends = self.groups.ends
            sequences = slice(bisect_left(ends, rows.start + 1), bisect_left(ends, rows.stop) + 1)
        part = self.forecast.of(sequences)
        places = self.places[rows] - sequences.start * part.weights.shape[1]  # [n]
        entropy_grads = part.entropy_grads
        return part.gradients(places, logps), None if entropy_grads is None else entropy_grads.flatten()[places]


def _of_batch(batch: GRPOBatch) -> dict[str, Any]:
    """The tensors of a micro-batch that have a row for each sequence, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor) and value.dim() > 1}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class SharedRowForecast:
    """A [`Forecast`] of an objective's policy terms, of which several may read the same row, as tokens of a trie."""

    objective: GRPOObjective
    grad_rows: int
    starts: Tensor  # [N + 1], on the CPU: where the terms of each row begin
    rows_of_terms: Tensor  # [M], ascending
    advantages: Tensor  # [M]
    old_logps: Tensor  # [M], nats

    @classmethod
    def of(
        cls,
        objective: GRPOObjective,
        positions: Tensor,  # [N]: the positions that rows are computed for, as [`grad_rows_first`] orders them
        grad_rows: int,
        terms: tuple[Tensor, Tensor, Tensor],  # [M] each: position, advantage and old log-prob
    ) -> "SharedRowForecast":
        """From terms in any order."""
        ascending, row_of = positions.sort()
        rows, order = row_of[torch.searchsorted(ascending, terms[0])].sort()
        starts = torch.searchsorted(rows, torch.arange(len(positions) + 1, device=rows.device)).cpu()
        return cls(objective, grad_rows, starts, rows, terms[1][order], terms[2][order])

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        part = slice(*self.starts[[rows.start, rows.stop]].tolist())
        with torch.enable_grad():
            leaf = logps.detach().requires_grad_()
            of_terms = leaf[self.rows_of_terms[part] - rows.start]
            loss = policy_loss(self.objective, self.advantages[part], of_terms, of_terms - self.old_logps[part])
            return torch.autograd.grad(loss.sum(), leaf)[0], None


def forecast(
    objective: GRPOObjective, batch: GRPOBatch, correction: SamplingCorrection | None = None
) -> BatchForecast | None:
    """
    Forecast the gradient of every position of a micro-batch, up to one common factor.

    With a `correction` the ratio of policy and sampler is computed from the policy's log-probabilities, and the batch
    has no old ones.

    Returns:
        [`BatchForecast`], or `None` where a token's gradient depends on other sequences
        ([`GRPOObjective.is_sequencewise`]).
    """
    if not objective.is_sequencewise:
        return None
    weights = token_weights(objective, batch)  # [B, T]
    unit = _power_of_two_below_inverse(weights.max() if weights.numel() else weights.new_zeros(()))
    weights = weights * unit
    is_on_policy = batch.old_per_token_logps is None
    is_tokenwise = objective.is_tokenwise(has_old_logps=not is_on_policy)
    if correction is None:
        by_token = is_known_at_one = is_tokenwise
    elif correction.is_per_sequence:  # the ratio multiplies the terms of a sequence; VESPO takes it into its own weight
        by_token, is_known_at_one = False, is_tokenwise and objective.loss_type != "vespo"
    else:  # it multiplies each token's own term
        by_token = is_known_at_one = objective.is_tokenwise(has_old_logps=True)
    return BatchForecast(
        objective,
        batch,
        unit,
        weights,
        entropy_weights(objective, batch) * unit if objective.entropy_coef != 0.0 else None,
        _on_policy_gradient(objective, batch, weights) if is_on_policy and is_known_at_one else None,
        correction,
        by_token,
    )


def _on_policy_gradient(objective: GRPOObjective, batch: GRPOBatch, weights: Tensor) -> Tensor:
    """Gradient of the policy term `[B, T]` at ratio one, where it is the same for any log-probability."""
    with torch.enable_grad():
        logps = torch.zeros_like(weights).requires_grad_()
        terms = token_terms(replace(objective, beta=0.0), batch, logps)
        return torch.autograd.grad((terms.loss * weights).sum(), logps)[0]


def _power_of_two_below_inverse(largest: Tensor) -> Tensor:
    """
    The scale of a forecast, a scalar tensor: it puts the largest weight between 1/2 and 1.

    Only proportions matter, and float16 gradients would underflow without it. A power of two changes no rounding: terms
    that nearly cancel leave the same difference as in the loss.
    """
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    return largest.frexp().mantissa / largest


def grad_rows_first(mask: Tensor, needs_grad: Tensor | None) -> tuple[Tensor, int]:
    """
    Return the flat positions `[N]` where `mask` `[B, T]` is true, those that need a gradient first, and how many do.
    """
    if needs_grad is None:
        positions = mask.flatten().nonzero().squeeze(-1)
        return positions, len(positions)
    groups = [rows.flatten().nonzero().squeeze(-1) for rows in (mask & needs_grad, mask & ~needs_grad)]
    return torch.cat(groups), len(groups[0])
