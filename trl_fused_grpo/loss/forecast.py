"""
Forecasts the gradient that each row of the fused head will receive, from a GRPO objective and a micro-batch.

Most objectives give a token a gradient that depends on its own log-probability alone. [`forecast`] computes everything
else beforehand: [`GradientTerms`], one number per position, inside a [`BatchForecast`]. The fused head computes only
the positions that the loss reads, those that need a gradient first ([`grad_rows_first`]). [`BatchForecast.at`] picks
their numbers, and the [`RowForecast`] that it returns gives the fused head a chunk's gradients as soon as its
log-probabilities exist.

Read on in `objective.py` (the formulas), `reduction.py` (the weight of a token) and `ops/linear_logps.py` (who calls a
forecast).
"""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from .batch import GRPOBatch
from .importance_sampling import SamplingCorrection
from .objective import GRPOObjective, kl_loss, kl_reference, policy_loss
from .reduction import entropy_weights, token_weights
from .sequence_forecast import SampledForecast, SequenceForecast, on_policy_gradient


@dataclass(frozen=True)
class GradientTerms:
    """The numbers that a row's gradients are computed from, one per position `[B, T]` or row `[N]`."""

    scale: Tensor  # weight of the policy term
    on_policy: Tensor | None  # gradient of the policy term; `None` where it depends on the log-probability
    advantages: Tensor
    old_logps: Tensor | None  # log-probabilities of the old policy, nats
    ref_logps: Tensor | None  # the same of the reference
    kl_weights: Tensor | None  # weight of the KL term; `None` without one
    entropy_grads: Tensor | None  # gradient of the entropies; `None` without an entropy bonus
    sampling_logps: Tensor | None = None  # of the sampler, nats, for the `correction`

    @property
    def given(self) -> dict[str, Tensor]:
        """Those that are not `None`, by name."""
        return {name: values for name, values in vars(self).items() if values is not None}

    def at(self, index: Tensor) -> "GradientTerms":
        """Select the flat positions `index` `[N]`."""
        return replace(self, **{name: values.reshape(-1).index_select(0, index) for name, values in self.given.items()})

    def scaled(self, factor: Tensor) -> "GradientTerms":
        """The terms of gradients `factor` times as large; `factor` is a scalar tensor."""
        linear = self.given.keys() & {"scale", "on_policy", "kl_weights", "entropy_grads"}
        return replace(self, **{name: self.given[name] * factor for name in linear})

    @classmethod
    def joined(cls, parts: list["GradientTerms"]) -> "GradientTerms":
        """Concatenate the terms of several micro-batches."""
        return replace(parts[0], **{name: torch.cat([part.given[name] for part in parts]) for name in parts[0].given})


@dataclass(frozen=True)
class BatchForecast:
    """The forecast for all positions of a micro-batch."""

    objective: GRPOObjective  # the options of the loss
    terms: GradientTerms  # [B, T] each, multiplied by `unit`
    unit: Tensor  # scale of the forecast against the true gradients, a power of two; a scalar tensor
    correction: SamplingCorrection | None = None  # computes the ratio of policy and sampler

    @classmethod
    def joined(cls, parts: list["BatchForecast"]) -> "BatchForecast":
        """Concatenate the forecasts of several micro-batches of one accumulation window, brought to one scale."""
        unit = torch.stack([part.unit for part in parts]).min()
        terms = [part.terms.scaled(unit / part.unit) for part in parts]
        return cls(parts[0].objective, GradientTerms.joined(terms), unit, parts[0].correction)

    @property
    def needs_grad(self) -> Tensor:
        """Bool `[B, T]`, true where a position can receive a gradient."""
        terms = self.terms
        of_policy = (terms.scale != 0) & (terms.advantages != 0) if terms.on_policy is None else terms.on_policy != 0
        others = (grads != 0 for grads in (terms.kl_weights, terms.entropy_grads) if grads is not None)
        return reduce(torch.logical_or, others, of_policy)

    def at(self, index: Tensor, grad_rows: int) -> "RowForecast":
        """Select the rows at the flat positions `index` `[N]`; those from `grad_rows` on need no gradient."""
        return RowForecast(self.objective, grad_rows, self.terms.at(index), self.correction)


@dataclass(frozen=True)
class RowForecast:
    """A [`Forecast`] for the rows in the order in which the fused head takes them."""

    objective: GRPOObjective
    grad_rows: int
    terms: GradientTerms
    correction: SamplingCorrection | None = None

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        terms = self.terms
        grad = torch.zeros_like(logps) if terms.on_policy is None else terms.on_policy[rows]
        if self.correction is not None and terms.sampling_logps is not None:
            grad = grad * self.correction.ratio(logps, terms.sampling_logps[rows], torch.ones_like(logps))
        if terms.on_policy is None or terms.kl_weights is not None:
            with torch.enable_grad():
                leaf = logps.detach().requires_grad_()
                grad = grad + torch.autograd.grad(self._loss(rows, leaf), leaf)[0]
        return grad, None if terms.entropy_grads is None else terms.entropy_grads[rows]

    def _loss(self, rows: slice, logps: Tensor) -> Tensor:
        """The weighted terms whose gradient depends on the log-probability, summed; a scalar."""
        terms = self.terms
        log_ratio = logps - (logps.detach() if terms.old_logps is None else terms.old_logps[rows])
        total = logps.new_zeros(())
        if terms.on_policy is None:
            loss = policy_loss(self.objective, terms.advantages[rows], logps, log_ratio)
            total = total + (loss * terms.scale[rows]).sum()
        if terms.kl_weights is not None and terms.ref_logps is not None:
            kl = kl_loss(self.objective, terms.ref_logps[rows], logps, log_ratio)
            total = total + (kl * terms.kl_weights[rows]).sum()
        return total


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
) -> BatchForecast | SequenceForecast | None:
    """
    Forecast the gradient of every position of a micro-batch, up to one common factor.

    With a `correction` the ratio of policy and sampler is computed from the policy's log-probabilities, and the batch
    has no old ones.

    Returns:
        [`BatchForecast`]; [`SequenceForecast`] where a token's gradient depends on its sequence
        ([`GRPOObjective.is_tokenwise`]), or its ratio does; or `None` where it depends on other sequences
        ([`GRPOObjective.is_sequencewise`]).
    """
    is_on_policy = batch.old_per_token_logps is None
    if not objective.is_sequencewise:
        return None
    weights = token_weights(objective, batch)  # [B, T]
    unit = _power_of_two_below_inverse(weights.max() if weights.numel() else weights.new_zeros(()))
    scale = weights * unit
    entropy_grads = entropy_weights(objective, batch) * unit if objective.entropy_coef != 0.0 else None
    # A ratio that multiplies each token's own term keeps the tokens apart
    keeps_apart = correction is None or (not correction.is_per_sequence and objective.is_tokenwise(has_old_logps=True))
    is_tokenwise = objective.is_tokenwise(has_old_logps=not is_on_policy)
    has_kl = kl_reference(objective, batch) is not None
    if not keeps_apart or not is_tokenwise:
        # VESPO takes the sampler's ratio into its own weight
        multiplies = correction is not None and correction.is_per_sequence and objective.loss_type != "vespo"
        kind = SampledForecast if multiplies and is_tokenwise and not has_kl else SequenceForecast
        return kind(objective, batch, scale, entropy_grads, unit, correction)
    kl_weights = scale * objective.beta if has_kl else None

    on_policy = on_policy_gradient(objective, batch, scale) if is_on_policy else None
    if not is_on_policy and batch.importance_sampling_ratio is not None:
        scale = scale * batch.importance_sampling_ratio
    terms = GradientTerms(
        scale=scale,
        on_policy=on_policy,
        advantages=batch.advantages.float().expand_as(weights),
        old_logps=batch.old_per_token_logps,
        ref_logps=None if kl_weights is None else batch.ref_per_token_logps,
        kl_weights=kl_weights,
        entropy_grads=entropy_grads,
        sampling_logps=None if correction is None else batch.sampling_per_token_logps,
    )
    return BatchForecast(objective, terms, unit, correction)


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
