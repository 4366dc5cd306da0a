"""The forecast where the importance ratio of a token follows from the log-probability that the fused head computes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .forecast import BatchForecast, RowForecast
from .importance_sampling import SamplingCorrection


@dataclass(frozen=True)
class DeferredForecast:
    """
    A [`BatchForecast`] that computes the importance ratio from the log-probabilities that the fused head computes.

    For the token modes, where the policy is the old policy.
    """

    without_ratio: BatchForecast  # the forecast of the same batch with ratio one
    correction: SamplingCorrection  # computes the ratio
    sampling_logps: Tensor  # [B, T], nats

    @classmethod
    def joined(cls, parts: list["DeferredForecast"]) -> "DeferredForecast":
        """Concatenate the forecasts of several micro-batches of one accumulation window, brought to one scale."""
        without_ratio = BatchForecast.joined([part.without_ratio for part in parts])
        return cls(without_ratio, parts[0].correction, torch.cat([part.sampling_logps for part in parts]))

    @property
    def needs_grad(self) -> Tensor:
        """As in [`BatchForecast`]."""
        return self.without_ratio.needs_grad

    def at(self, index: Tensor, grad_rows: int) -> "DeferredRowForecast":
        """As [`BatchForecast.at`]."""
        rows = self.without_ratio.at(index, grad_rows)
        sampling_logps = self.sampling_logps.reshape(-1).index_select(0, index)
        return DeferredRowForecast(rows, self.correction, sampling_logps, grad_rows)


@dataclass(frozen=True)
class DeferredRowForecast:
    """A [`Forecast`] for the rows in the order in which the fused head takes them."""

    without_ratio: RowForecast
    correction: SamplingCorrection
    sampling_logps: Tensor
    grad_rows: int

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ratio = self.correction.ratio(logps, self.sampling_logps[rows], torch.ones_like(logps))
        terms = self.without_ratio.terms
        assert terms.on_policy is not None, "a deferred ratio needs an on-policy forecast"
        without_kl = replace(self.without_ratio, terms=replace(terms, kl_weights=None))
        policy, entropy_grads = without_kl(rows, logps, entropies)
        if terms.kl_weights is None:
            return policy * ratio, entropy_grads
        kl_only = replace(self.without_ratio, terms=replace(terms, on_policy=torch.zeros_like(terms.on_policy)))
        return policy * ratio + kl_only(rows, logps, entropies)[0], entropy_grads
