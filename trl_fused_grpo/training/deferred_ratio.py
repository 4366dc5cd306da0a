"""The importance ratio of policy and vLLM that generation leaves to the training forward."""

from typing import Any

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.importance_sampling import SamplingCorrection


# Marks micro-batches whose importance ratio generation left to the training pass
DEFERRED = "importance_sampling_ratio_from_training"


def sampling_correction(trainer: Any) -> SamplingCorrection:
    """The trainer's vLLM importance-sampling correction."""
    clip_min, clip_max = trl_compat.sampling_clip_range(trainer)
    return SamplingCorrection(
        mode=trainer.vllm_importance_sampling_mode,
        clip_min=clip_min,
        clip_max=clip_max,
        nan_ratio_is_one=trl_compat.NAN_RATIO_IS_ONE,
    )
