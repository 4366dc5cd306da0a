"""Whose methods a trainer runs: TRL's, this package's, or those of a subclass, of the instance, of a patched class."""

from collections.abc import Iterable
from typing import Any

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import is_library_function


_PACKAGE = __name__.partition(".")[0]


def _is_fused_trainer(cls: type) -> bool:
    return cls.__module__ in (f"{_PACKAGE}.trainer", f"{_PACKAGE}.rloo")


def _is_trls(trainer: Any, cls: type, name: str) -> bool:
    """
    Return `True` if a method of this class is TRL's own and known here: a trainer's, or an objective of its subclasses.
    """
    if cls in trainers.trl_class(type(trainer)).__mro__:
        return True
    return name == "_compute_loss" and trainers.experimental_objective(vars(cls)[name]) is not None


def loss_type_of(trainer: Any) -> str:
    """The loss type that the trainer's `_compute_loss` computes: its own option, or the one of TRL's subclass."""
    for cls in type(trainer).__mro__:
        if "_compute_loss" in vars(cls) and not _is_fused_trainer(cls):
            return trainers.experimental_objective(vars(cls)["_compute_loss"]) or trainers.loss_type(trainer)
    return trainers.loss_type(trainer)


def has_objective_in_front(trainer: Any) -> bool:
    """
    Return `True` if an objective of one of TRL's subclasses comes before `FusedGRPOTrainer` in the resolution order.
    """
    method = type(trainer)._compute_loss
    return trainers.experimental_objective(method) is not None and replaced_method(trainer, ["_compute_loss"]) is None


def replaced_method(trainer: Any, names: Iterable[str]) -> str | None:
    """
    The first of these methods of a trainer that is not TRL's or this package's, as `Class.method`, or `None`. It may
    have been replaced in a subclass, on the instance, or in TRL's own class.
    """
    for name in names:
        if name in vars(trainer):
            return f"the instance's {name}"
        for cls in type(trainer).__mro__:
            method = vars(cls).get(name)
            if method is None:
                continue
            is_known = _is_fused_trainer(cls) or _is_trls(trainer, cls, name)
            if not is_known or not is_library_function(getattr(method, "__func__", method)):
                return f"{cls.__name__}.{name}"
    return None


def replaced_behind(trainer: Any, name: str) -> str | None:
    """
    What `super()` finds for a method of the fused trainer, as `Class.method`, if that is not TRL's; `None` if it is.
    Either TRL's own class was patched, or a class of the user's comes between the two in the method resolution order.
    """
    classes = type(trainer).__mro__
    fused = max((place for place, cls in enumerate(classes) if _is_fused_trainer(cls)), default=-1)
    cls = next(cls for cls in classes[fused + 1 :] if name in vars(cls))
    is_known = _is_trls(trainer, cls, name) and is_library_function(vars(cls)[name])
    return None if is_known else f"{cls.__name__}.{name}"


def replaced_objective(trainer: Any) -> str | None:
    """
    The first method of TRL's objective that the user replaced, as `Class.method`; `None` where all are TRL's. Only
    TRL's own are known to read nothing else of a micro-batch than `GRPOObjective` does.
    """
    return replaced_method(trainer, ("_compute_loss", *trl_compat.OBJECTIVE_METHODS))


def computed_option(trainer: Any) -> str | None:
    """
    An attribute that a class of the user's computes at each access, as `Class.option`, or `None`: one that log-probs
    are computed with, or any by `__getattribute__`.
    """
    for cls in type(trainer).__mro__:
        if cls not in trainers.trl_class(type(trainer)).__mro__:
            for name in ("__getattribute__", "temperature", "args"):
                if hasattr(type(vars(cls).get(name)), "__get__"):
                    return f"{cls.__name__}.{name}"
    return None
