"""
The cases of `--customised`: a user changes the trainer, its model or what stands around it, and whole runs of
`trainer.train()` are compared. What is changed is written in `tests/harness/customisations/`.
"""

from tests.harness.case import Training

from . import around_the_trainer, callbacks, fused_classes, methods, model, objectives


CUSTOMISED_CASES: tuple[Training, ...] = (
    *methods.controls(),
    *methods.overridden_methods(),
    *objectives.objectives(),
    *methods.patches(),
    *objectives.generations(),
    *callbacks.callbacks(),
    *callbacks.interruptions(),
    *callbacks.generation_batches(),
    *callbacks.reference_models(),
    *model.hooks(),
    *model.parts_of_layers(),
    *model.models(),
    *model.adapters(),
    *around_the_trainer.around(),
    *fused_classes.of_rloo(),
    *fused_classes.of_trl(),
    *fused_classes.of_users(),
)
