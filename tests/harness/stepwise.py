"""The customisations of whole trainings that make sense for single steps too: cases drawn at random may have one."""

from .case import Customisation
from .cases import CUSTOMISED_CASES


_NAMES = (
    *("compute-loss-l2", "compute-loss-scaled", "compute-loss-epsilon", "compute-loss-seen", "compute-loss-advantages"),
    *("training-step-gradients", "training-step-clips", "log-probs-other-ids", "log-probs-second-call"),
    *("log-probs-temperature", "log-probs-scaled", "own-loss-entropy", "loss-twice", "loss-plus", "inputs-weighted"),
    *("instance-compute-loss", "instance-own-loss-lambda", "instance-log-probs", "generation-read"),
    *("generation-advantages", "behind-compute-loss", "behind-own-loss", "behind-log-probs"),
    *("model-hook-sees", "model-hook-changes", "model-pre-hook", "head-hook", "layer-hook-sees", "layer-hook-token"),
    *("layer-hook-column", "layer-forward-token", "parameter-hook-sees", "parameter-hook-clips", "accumulate-hook"),
    *("backward-seen", "multi-grad-hook", "substep-gradients", "reward-asks"),
)


_NAMED = {case.name: case.customised for case in CUSTOMISED_CASES}
CUSTOMISATIONS: dict[str, Customisation] = {name: _NAMED[name] for name in _NAMES}  # by the name of its case
