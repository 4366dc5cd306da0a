"""
`trl-fused-grpo parity`: runs stock TRL, the fused trainer and, where TRL has one, TRL's Liger loss on the same batches,
and compares loss, gradients and metrics. A map of the folder:

- `case` says what a comparison is made of: a [`Case`], its data, and a [`Customisation`] (what a user changes).
- `cases/` lists the named cases of the four sets: `CASES`, `MODEL_CASES` (`--models`), `CUSTOMISED_CASES`,
  `ISSUE_1082_CASES`.
- `customisations/` holds what the cases of `--customised` change: subclasses, patches, callbacks, hooks, models.
- `tiny/` builds the inputs: tiny models of every family, a tokenizer, images, adapters, micro-batches, completions.
- `trainers` builds the trainers of a case; `run_case` takes one trainer through its steps, `run_training` through a
  whole `train()`; `errors` and `training_errors` measure how far two results are apart.
- `compare` runs a case on every trainer and gives the verdict, a [`Result`] (`result`); `judge` says which errors are
  too large, `jobs` spreads cases over processes.
- `random_cases` draws cases at random (`drawing`: how, and what is drawn last), some with a customisation that
  `stepwise` names, and `random_trainings` whole trainings; `fuzz` runs them (`--random`); `rounding` (float32),
  `chance` and `flips` (bfloat16) tell ties and rounding from differences, `shrink` finds what a failure needs.
- `report` prints the table and writes the JSON file and the plot.
"""

from . import report
from .case import Batch, Case, Rollout
from .cases import CASES, CUSTOMISED_CASES, ISSUE_1082_CASES, MODEL_CASES
from .compare import compare
from .result import Result
from .trainers import Settings


__all__ = [
    "CASES",
    "CUSTOMISED_CASES",
    "ISSUE_1082_CASES",
    "MODEL_CASES",
    "Batch",
    "Case",
    "Result",
    "Rollout",
    "Settings",
    "compare",
    "report",
]
