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
    Keeps what the sampling metrics of one generation batch are made of, one micro-batch after the other, until they are
    logged.

    It is stored by the micro-batch's number in the generation batch, because an interrupted step adds its own again.
    """

    parts: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def add(
        self,
        number: int,
        logps: Tensor,
        sampling_logps: Tensor,
        mask: Tensor,
        ratio: Tensor,
        left_out: Tensor | None = None,
    ) -> None:
        """
        Keep the values of a micro-batch, by its `number`; shapes as in [`SamplingCorrection.ratio`]. Sequences of
        `left_out` `[B]`, bool, do not count.
        """
        kept = torch.ones_like(mask[:, :1], dtype=torch.bool) if left_out is None else ~left_out.unsqueeze(1)
        self.parts[number] = logps, sampling_logps, mask, kept, ratio

    def gathered(self, accelerator, correction: SamplingCorrection) -> dict[str, float]:
        """The metrics of the generation batch over all processes, which must all call this, under TRL's names."""
        rows = accelerator.gather(self._of_process(correction).unsqueeze(0)).cpu()  # [processes, 5]
        low, high = _known(rows[:, 2]).min(), _known(rows[:, 4]).max()
        means = [rows[:, 0].mean(), rows[:, 1].max(), low, rows[:, 3].nanmean(), high]
        return dict(zip(SAMPLING_METRICS, torch.stack(means).tolist(), strict=True))

    def _of_process(self, correction: SamplingCorrection) -> Tensor:
        """Mean and greatest difference, least, mean and greatest ratio `[5]` of this process; zero of none."""
        logps, sampling_logps, mask, kept, ratio = map(torch.cat, zip(*self.parts.values(), strict=True))
        counts = mask.bool() & kept
        difference = (logps - sampling_logps).abs()[counts]
        ratio = ratio[kept if correction.is_per_sequence else counts]
        if correction.nan_ratio_is_one:
            difference = difference[~difference.isnan()]
        difference, ratio = (x.double() if len(x) else x.new_zeros(1).double() for x in (difference, ratio))
        return torch.stack([difference.mean(), difference.max(), ratio.min(), ratio.mean(), ratio.max()])


def _known(values: Tensor) -> Tensor:
    """The values that are numbers, all if none is."""
    is_nan = values.isnan()
    return values if is_nan.all() else values[~is_nan]
