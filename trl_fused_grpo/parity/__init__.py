"""Stock TRL, the fused trainer and, where the host has one, stock Liger on the same batches."""

from . import report
from .case import Batch, Case, Rollout
from .cases import CASES, CUSTOMISED_CASES, MODEL_CASES
from .comparison import Result, compare
from .trainers import Settings


__all__ = [
    "CASES",
    "CUSTOMISED_CASES",
    "MODEL_CASES",
    "Batch",
    "Case",
    "Result",
    "Rollout",
    "Settings",
    "compare",
    "report",
]
