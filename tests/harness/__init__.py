"""
`python -m tests.harness`: whole trainings with what users change, and cases drawn at random, on stock TRL and on the
fused trainer. It adds to `trl_fused_grpo.parity`, whose named cases anybody can run. A map of the folder:

- `case` says what is compared: a [`Training`], a [`DrawnCase`], and a [`Customisation`] (what a user changes).
- `cases/` lists the customised trainings, `customisations/` holds what they change. None of that is this package's own
  code: it counts as a user's.
- `models` adds tiny models and adapters to `trl_fused_grpo.parity.tiny`, `census` one of every other architecture, and
  `serve` RLOO's completions.
- `run_training` takes a trainer through `train()`, `training_errors` says how far two trainings are apart.
- `random_cases` draws cases (`drawing`: how, and what is drawn last), some with a customisation that `stepwise` names,
  and `random_trainings` whole trainings. `steps` takes a trainer through a drawn case; `judge` says what is wrong then,
  `rounding` (float32), `chance` and `flips` (bfloat16) tell ties and rounding from differences.
- `compare` gives the verdict, `fuzz` runs many cases, `shrink` finds what a failure needs, `command` is the command.
"""

from . import models
from .cases import CUSTOMISED_CASES
from .compare import compare


__all__ = ["CUSTOMISED_CASES", "compare", "models"]
