"""
Importance ratios of policy and sampler (vLLM), computed from the log-probabilities of the training forward.

TRL computes them after generation, with a forward of their own. On-policy, the training forward gives the same numbers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


SAMPLING_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


@dataclass(frozen=True)
class SamplingCorrection:
    """How the importance ratio of policy and sampler is bounded, under TRL's options."""

    mode: str  # `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`
    clip_min: float | None
    clip_max: float | None
    nan_ratio_is_one: bool  # whether a token without a sampling log-prob (NaN) gets ratio one (TRL >= 1.11)

    @property
    def is_per_sequence(self) -> bool:
        """Return `True` if there is one ratio for the whole sequence, not one for each token."""
        return self.mode.startswith("sequence")

    def ratio(self, logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
        """
        Compute the importance ratio from log-probs and a mask `[..., T]`, without gradient, as TRL does.

        Returns:
            `Tensor`: `[..., T]`, or `[..., 1]` for the sequence modes.
        """
        log_ratio = (logps - sampling_logps) * mask
        if self.nan_ratio_is_one:
            log_ratio = log_ratio.nan_to_num(nan=0.0)
        if self.is_per_sequence:
            log_ratio = log_ratio.sum(-1, keepdim=True)
        ratio = log_ratio.exp()
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.clip_min, max=self.clip_max)
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.clip_min is not None:
            outside |= ratio < self.clip_min
        if self.clip_max is not None:
            outside |= ratio > self.clip_max
        return ratio.masked_fill(outside, 0.0)


@dataclass
class SamplingMetrics:
    """
    Collects the sampling metrics of one generation batch, one micro-batch after the other, until they are logged.

    They are stored by the micro-batch's number in the generation batch, because an interrupted step adds its own again.
    """

    sequences: dict[int, Tensor] = field(default_factory=dict)

    def add(
        self,
        number: int,
        correction: SamplingCorrection,
        logps: Tensor,
        sampling_logps: Tensor,
        mask: Tensor,
        ratio: Tensor,
        left_out: Tensor | None = None,
    ) -> None:
        """
        Store the values of a micro-batch, by its `number`; shapes as in [`SamplingCorrection.ratio`]. Sequences of
        `left_out` `[B]`, bool, do not count.
        """
        difference, counts = (logps - sampling_logps).abs(), mask.bool()
        has_ratio = torch.ones_like(ratio, dtype=torch.bool) if correction.is_per_sequence else counts
        if left_out is not None:
            counts, has_ratio = (those & ~left_out.unsqueeze(1) for those in (counts, has_ratio))
        is_known = counts & ~difference.isnan() if correction.nan_ratio_is_one else counts
        columns = [*_summary(difference, is_known), *_summary(ratio, has_ratio), _greatest(-ratio, has_ratio)]
        self.sequences[number] = torch.stack(columns, dim=1)

    def gathered(self, accelerator) -> dict[str, float]:
        """The metrics of the generation batch over all processes, which must all call this, under TRL's names."""
        mine = _of_process(torch.cat([*self.sequences.values()]).double())  # [5]
        rows = accelerator.gather(mine.unsqueeze(0)).cpu()  # [processes, 5]
        low = torch.where(rows[:, 2].isnan(), float("inf"), rows[:, 2]).min()
        high = torch.where(rows[:, 4].isnan(), -float("inf"), rows[:, 4]).max()
        means = [rows[:, 0].mean(), rows[:, 1].max(), low, rows[:, 3].nanmean(), high]
        return dict(zip(SAMPLING_METRICS, torch.stack(means).tolist(), strict=True))


def _summary(values: Tensor, counts: Tensor) -> list[Tensor]:
    """Sum, number and greatest of the values `[B, T]` of each sequence that count."""
    return [values.where(counts, 0.0).sum(1), counts.sum(1).to(values), _greatest(values, counts)]


def _greatest(values: Tensor, counts: Tensor) -> Tensor:
    return values.where(counts, -float("inf")).amax(1)


def _of_process(sequences: Tensor) -> Tensor:
    """Mean and greatest difference, least, mean and greatest ratio of sequences; zero where there is none."""
    total, number, greatest, ratios, with_ratio, greatest_ratio, least_ratio = sequences.T
    difference = [total.sum() / number.sum(), greatest.max()] if number.any() else [number.sum()] * 2
    ratio = [-least_ratio.max(), ratios.sum() / with_ratio.sum(), greatest_ratio.max()]
    return torch.stack([*difference, *(ratio if with_ratio.any() else [with_ratio.sum()] * 3)])
