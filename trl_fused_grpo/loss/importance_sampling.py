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
    """
    How the importance ratio of policy and sampler is bounded, under TRL's options.

    Args:
        mode (`str`): `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`.
        clip_min, clip_max (`float`, *optional*): bounds of the ratio. The `truncate` modes clamp the ratio to them, the
            `mask` modes set a ratio outside to zero.
        nan_ratio_is_one (`bool`): whether a token without a sampling log-prob (NaN) gets ratio one (TRL >= 1.11).
    """

    mode: str
    clip_min: float | None
    clip_max: float | None
    nan_ratio_is_one: bool

    @property
    def is_per_sequence(self) -> bool:
        """Whether there is one ratio for the whole sequence, not one for each token."""
        return self.mode.startswith("sequence")

    def ratio(self, logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
        """
        Compute the importance ratio as TRL does.

        Args:
            logps, sampling_logps (`Tensor`): `[..., T]`, nats, the first without gradient.
            mask (`Tensor`): loss mask, same shape.

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

    They are stored by the micro-batch's place in the generation batch, because an interrupted step adds its own again.

    Args:
        differences (`dict[int, Tensor]`): absolute differences of the log-probabilities, nats, flat.
        ratios (`dict[int, Tensor]`): importance ratios, flat.
        is_logged (`bool`): whether the metrics of this generation batch are logged already.
    """

    differences: dict[int, Tensor] = field(default_factory=dict)
    ratios: dict[int, Tensor] = field(default_factory=dict)
    is_logged: bool = False

    def add(
        self,
        place: int,
        correction: SamplingCorrection,
        logps: Tensor,
        sampling_logps: Tensor,
        mask: Tensor,
        ratio: Tensor,
    ) -> None:
        """Store the values of the micro-batch at `place`; shapes as in [`SamplingCorrection.ratio`]."""
        difference = (logps - sampling_logps).abs()[mask.bool()]
        if correction.nan_ratio_is_one:
            difference = difference[~difference.isnan()]
        self.differences[place] = difference
        self.ratios[place] = ratio.flatten() if correction.is_per_sequence else ratio[mask.bool()]

    def gathered(self, accelerator) -> dict[str, float]:
        """The metrics of the generation batch over all processes, which must all call this, under TRL's names."""
        difference, ratio = torch.cat([*self.differences.values()]), torch.cat([*self.ratios.values()])
        zero = difference.new_zeros(())
        local = [difference.mean(), difference.max()] if len(difference) else [zero, zero]
        local += [ratio.min(), ratio.mean(), ratio.max()] if len(ratio) else [zero, zero, zero]
        table = accelerator.gather(torch.stack(local).unsqueeze(0))  # [processes, 5]
        low = torch.where(table[:, 2].isnan(), float("inf"), table[:, 2]).min()
        high = torch.where(table[:, 4].isnan(), -float("inf"), table[:, 4]).max()
        means = [table[:, 0].mean(), table[:, 1].max(), low, table[:, 3].nanmean(), high]
        return dict(zip(SAMPLING_METRICS, torch.stack(means).tolist(), strict=True))
