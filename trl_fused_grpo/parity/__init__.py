"""
`trl-fused-grpo parity`: runs stock TRL, the fused trainer and, where TRL has one, TRL's Liger loss on the same batches,
and compares loss, gradients and metrics. A map of the folder:

- `case` says what a comparison is made of: a [`Case`] and its data. `cases` lists the named ones.
- `tiny/` builds the inputs: tiny models of every family, a tokenizer, images, adapters, micro-batches, completions.
- `trainers` builds the trainers of a case, `run_case` takes one through its steps, `judge` measures how far two
  outcomes are apart and says which errors are too large.
- `compare` runs a case on every trainer, cases in several processes, and gives the verdict, a [`Result`].
- `report` prints the table and writes the JSON file and the plot.
"""

from .case import Batch, Case, Rollout
from .cases import CASES, ISSUE_1082_CASES, MODEL_CASES
from .compare import compare
from .judge import Result
from .trainers import Settings


__all__ = [
    "CASES",
    "ISSUE_1082_CASES",
    "MODEL_CASES",
    "Batch",
    "Case",
    "Result",
    "Rollout",
    "Settings",
    "compare",
]
