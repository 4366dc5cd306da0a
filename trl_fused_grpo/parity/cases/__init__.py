"""
The named cases, all that TRL's own GRPO path supports: `CASES`, `MODEL_CASES` (`--models`) and `ISSUE_1082_CASES`
(`--issue-1082`). A case is data; add one to the list of its topic.
"""

from trl_fused_grpo.parity.case import Case

from . import model, objective, setting
from .issue_1082 import ISSUE_1082_CASES, REPORT


__all__ = ["CASES", "ISSUE_1082_CASES", "MODEL_CASES"]

CASES: tuple[Case, ...] = (
    REPORT,
    *objective.loss_types(),
    *objective.importance_ratios(),
    *objective.advantages_and_temperature(),
    *objective.kl(),
    *objective.everything(),
    *objective.sampling_modes(),
    *objective.sampling_and_objectives(),
    *objective.sampling_options(),
    *objective.masks(),
    *objective.entropy(),
    *setting.models(),
    *setting.accumulation(),
    *setting.generation(),
    *setting.other_modes(),
)

# By family, then by kind of output projection
MODEL_CASES: tuple[Case, ...] = (*model.families(), *(case for case in CASES if case.head), *model.heads())
