"""
What of the user's code counts on every process where one of them has it, such as a hook on the main process alone.
Processes wait for one another where they plan and try forwards, and where weights are gathered for them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from trl_fused_grpo._compat import torch as torch_compat

from .agreement import of_all_processes
from .customisation import micro_batch_reader
from .customised_model import changed_module
from .eligibility import gradient_reader, why_generation_is_seen, why_not_fused


class FoundAnywhere:
    """
    What any process of a training has found.

    Args:
        trainer (`GRPOTrainer`): whose processes they are.

    Attributes:
        found (`frozenset[str]`):
            Names in `LOOKED_FOR`, this process' own included. Empty where there is one process. See [`elsewhere`].
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.found: frozenset[str] = frozenset()

    def look(self) -> None:
        """Find out, together with all other processes."""
        trainer, self.found = self.trainer, frozenset()  # what is found counts only as long as it is there
        if trainer.accelerator.num_processes == 1:
            return
        own = [find(trainer) is not None for find in LOOKED_FOR.values()]
        on_any = of_all_processes(trainer.accelerator, "hooks and methods", own).any(0).tolist()
        self.found = frozenset(name for name, is_found in zip(LOOKED_FOR, on_any, strict=True) if is_found)


def _why_not_fused(trainer: Any, model: nn.Module) -> str | None:
    return why_not_fused(trainer, model, trainer._fused.engine.causal_lm(model))


def _of_reference(find: Callable[[Any, nn.Module], str | None]) -> Callable[[Any], str | None]:
    """What finds something in a model, for the reference, if there is one."""
    return lambda trainer: None if trainer.ref_model is None else find(trainer, trainer.ref_model)


LOOKED_FOR: dict[str, Callable[[Any], str | None]] = {
    "micro-batches": micro_batch_reader,
    "generation batches": why_generation_is_seen,
    "moved weights": lambda trainer: trainer._fused.deferral.moved_by,
    "gradients": gradient_reader,
    "log-probs": lambda trainer: _why_not_fused(trainer, trainer.model_wrapped),
    "log-probs of the reference": _of_reference(_why_not_fused),
    "rows": lambda trainer: changed_module(torch_compat.modules_of(trainer.model_wrapped)),
    "rows of the reference": _of_reference(lambda trainer, model: trainer._fused.engine.why_rows_are_seen(model)),
    "code": lambda trainer: trainer._fused.engine.unknown_code(trainer.model),
    "code of the reference": _of_reference(lambda trainer, model: trainer._fused.engine.unknown_code(model)),
}
