"""The trainers of TRL that have a fused subclass here, and what is known of TRL's own subclasses of them."""

from typing import Any

from trl import GRPOTrainer


# The trainers of TRL whose methods `FusedGRPOTrainer` and its like override
TRAINERS: tuple[type, ...] = (GRPOTrainer,)

# The methods of transformers' Trainer between `train` and `training_step`: the second since transformers 5
LOOP_METHODS = ("_inner_training_loop", "_run_epoch")

# Objectives of `loss/objective.py` that a subclass in `trl.experimental` computes. GMPO: TRL >= 1.8, the same in each
_OBJECTIVES = {("trl.experimental.gmpo.gmpo_trainer", "GMPOTrainer._compute_loss"): "gmpo"}


def trl_class(cls: type) -> type:
    """The trainer of TRL, one of [`TRAINERS`], that a class is or inherits from."""
    return next(one for one in cls.__mro__ if one in TRAINERS)


def experimental_objective(method: Any) -> str | None:
    """
    The loss type that a `_compute_loss` computes if it is that of a trainer in `trl.experimental`; `None` if it is
    another, or one that [`loss/objective.py`] does not have.
    """
    names = getattr(method, "__globals__", {}).get("__name__"), getattr(method, "__qualname__", None)
    return _OBJECTIVES.get(names)
