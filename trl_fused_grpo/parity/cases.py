"""The named cases: everything TRL's own GRPO path supports."""

from . import cases_model as model
from . import cases_objective as objective
from . import cases_setting as setting
from .case import Batch, Case
from .cases_customised import CUSTOMISED_CASES as CUSTOMISED_CASES


CASES: tuple[Case, ...] = (
    Case(
        "issue-1082",
        "the bug report: dapo, vLLM importance ratios of mean 0.003 to 0.01",
        {"loss_type": "dapo"},
        Batch(old="policy", ratio="report"),
    ),
    *objective.loss_types(),
    *objective.objective(),
    *objective.sampling_modes(),
    *objective.masks(),
    *objective.entropy(),
    *setting.models(),
    *setting.schedule(),
)

# `--models`: by family, then by kind of head
MODEL_CASES: tuple[Case, ...] = (*model.families(), *(case for case in CASES if case.head), *model.heads())
