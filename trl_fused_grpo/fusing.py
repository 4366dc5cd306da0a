"""
`fuse(TrainerClass)`: the fused subclass of `GRPOTrainer`, `RLOOTrainer`, `AsyncGRPOTrainer` and any subclass of theirs,
TRL's and your own. `fuse_config(ConfigClass)`: its configuration with the fused options.

The new class has the bases `(TrainerClass, FusedGRPOTrainer)`, or another fused trainer. So methods run in the order
`TrainerClass`, `FusedGRPOTrainer`, `GRPOTrainer`: an override runs first, as in the class it was written for, and what
it calls with `super()` is the fused trainer's method, then TRL's.
"""

import copyreg
import inspect
import sys
from dataclasses import field, fields, make_dataclass
from functools import wraps
from types import new_class
from typing import Any, TypeVar

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ._compat.dataclass_fields import is_generated
from ._compat.trainers import CONFIGS, TRAINERS, is_async, is_config_class, trl_class
from .config import FusedGRPOConfig, FusedOptions, OptionsOfConfig
from .rloo import FusedRLOOTrainer
from .trainer import FusedGRPOTrainer


Class = TypeVar("Class", bound=type)

FUSED_TRAINERS: dict[type, Any] = {GRPOTrainer: FusedGRPOTrainer, RLOOTrainer: FusedRLOOTrainer}


def _fused_base(trainer_class: type) -> Any:
    """The fused trainer for a class, `None` where TRL's it inherits from has none."""
    stock = next((cls for cls in trainer_class.__mro__ if cls in FUSED_TRAINERS or is_async(cls)), None)
    if stock is not None and stock not in FUSED_TRAINERS:
        from .async_grpo import FusedAsyncGRPOTrainer  # imports what warns that it is experimental

        FUSED_TRAINERS[stock] = FusedAsyncGRPOTrainer
    return FUSED_TRAINERS.get(stock)


class _Fused:
    """
    First base of what [`fuse`] returns. To `__init_subclass__` of the user's class that is no new subclass: it has run
    for the class itself, and what it did to the methods is inherited.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if _Fused not in cls.__bases__:
            super().__init_subclass__(**kwargs)


def fuse(trainer_class: Class) -> Class:
    """
    The fused subclass of a trainer's class. What it overrides runs as it does there; the log-probabilities that TRL's
    methods behind it ask for come from the fused linear function, unless the arguments say `use_liger_loss=False`.

    ```python
    FusedGMPOTrainer = fuse(GMPOTrainer)


    @fuse
    class MyTrainer(GRPOTrainer): ...
    ```

    What may see micro-batches lowers the level of the training, which is said once: see `docs/faster-paths.md`.

    Args:
        trainer_class (`type`):
            [`~trl.GRPOTrainer`], [`~trl.RLOOTrainer`], TRL 1.16's `AsyncGRPOTrainer` or a subclass of one.

    Returns:
        `type`: [`FusedGRPOTrainer`], [`FusedRLOOTrainer`] or [`FusedAsyncGRPOTrainer`] for TRL's own; the class itself
        if it is a subclass of one of these; else a subclass of `trainer_class` and of the one for it, the same at each
        call. As a decorator it keeps the class's name.

    Raises:
        `TypeError`: for anything else; and in the constructor, where that of a base class is called by its name.
        `ImportError`: for the `AsyncGRPOTrainer` of another TRL, with what it lacks.
    """
    if not isinstance(trainer_class, type):
        hint = f": pass its class, {type(trainer_class).__name__}" if isinstance(trainer_class, TRAINERS) else ""
        raise TypeError(f"fuse takes a class, not {trainer_class!r}{hint}.")
    fused_base = _fused_base(trainer_class)
    if fused_base is None:
        bases = ", ".join(cls.__name__ for cls in TRAINERS)
        raise TypeError(
            f"fuse takes {bases}, AsyncGRPOTrainer or a subclass of one, but {trainer_class.__name__} is none."
        )
    if trainer_class in FUSED_TRAINERS:
        return fused_base
    if issubclass(trainer_class, fused_base):
        return trainer_class
    made: list[Any] = [cls for cls in type.__subclasses__(trainer_class) if _Fused in cls.__bases__]
    return made[0] if made else _fused_subclass(trainer_class, sys._getframe(1).f_globals["__name__"])


def _fused_subclass(trainer_class: Any, caller: str) -> Any:
    """
    Make the class. So that it can be pickled, it has the name under which it is most likely to be found: that of the
    class where it replaces it, as a decorator's does, else `Fused...` in the module that asks for it.
    """
    fused_base = FUSED_TRAINERS[trl_class(trainer_class)]
    name, module = trainer_class.__qualname__, trainer_class.__module__
    if getattr(sys.modules.get(module), name, None) is trainer_class:
        name, module = f"Fused{trainer_class.__name__}", caller

    @wraps(trainer_class.__init__)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        super(fused_class, self).__init__(*args, **kwargs)
        if "_fused" not in vars(self):
            raise TypeError(
                f"{trainer_class.__name__}.__init__ calls the constructor of TRL's class by its name, so that "
                f"{fused_base.__name__}'s does not run: call super().__init__ instead."
            )

    namespace = {
        "__init__": constructor,
        "__module__": module,
        "__qualname__": name,
        "__doc__": f"Fused subclass of `{trainer_class.__name__}`, see `{fused_base.__name__}`.\n\n"
        f"{inspect.getdoc(trainer_class) or ''}",
        "_tag_names": [*getattr(trainer_class, "_tag_names", []), fused_base._tag_names[-1]],
    }
    bases = (_Fused, trainer_class, fused_base)
    fused_class = new_class(name.rpartition(".")[2], bases, exec_body=lambda body: body.update(namespace))
    return fused_class


class _FusedConfig(OptionsOfConfig):
    """First base of what [`fuse_config`] returns."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Trainers save their arguments with each checkpoint. The class is made anew where they are loaded
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        is_plain = reduced[0] is copyreg.__newobj__  # ty: ignore[missing-attribute]
        if _FusedConfig not in type(self).__bases__ or not is_plain:
            return reduced  # a subclass of it, or a `__reduce__` of the user's
        return _new_config, (type(self).__bases__[1],), *reduced[2:]


def _new_config(config_class: type) -> Any:
    cls: Any = fuse_config(config_class)
    return cls.__new__(cls)


def fuse_config(config_class: Class) -> Class:
    """
    A configuration's class with the options of [`FusedGRPOConfig`] added and the fused loss on. All of its own
    defaults stay.

    ```python
    args = fuse_config(GMPOConfig)(output_dir="out", fused_layout="packed")
    trainer = fuse(GMPOTrainer)(model, reward_funcs, args=args, train_dataset=dataset)
    ```

    Args:
        config_class (`type`): [`~trl.GRPOConfig`], [`~trl.RLOOConfig`], `AsyncGRPOConfig` or a subclass, a dataclass.

    Returns:
        `type`: [`FusedGRPOConfig`] for `GRPOConfig`; the class itself if it has the options; else a subclass of it, the
        same one at each call. Its objects can be pickled.

    Raises:
        `TypeError`: for anything else, where a field of its own has the name of an option, and where its constructor is
        not `dataclass`'s.
    """
    if not (isinstance(config_class, type) and is_config_class(config_class)):
        bases = ", ".join(cls.__name__ for cls in CONFIGS)
        raise TypeError(f"fuse_config takes {bases}, AsyncGRPOConfig or a subclass of one, not {config_class!r}.")
    if config_class is GRPOConfig:
        return FusedGRPOConfig  # ty: ignore[invalid-explicit-return]
    if issubclass(config_class, OptionsOfConfig):
        return config_class
    made: list[Any] = [cls for cls in type.__subclasses__(config_class) if _FusedConfig in cls.__bases__]
    return made[0] if made else _fused_config(config_class)


def _fused_config(config_class: Any) -> Any:
    own = {option.name for option in fields(config_class)}
    options = {option.name for option in fields(FusedOptions)}
    clash = sorted(options & (own | set(dir(config_class))))
    if clash:
        raise TypeError(
            f"{config_class.__name__} has a {clash[0]} of its own, which is the name of a fused option: rename it."
        )
    if not is_generated(config_class.__init__):
        raise TypeError(
            f"{config_class.__name__} has a constructor of its own, which the fused options would bypass: use a "
            "dataclass with __post_init__ instead."
        )
    flag = FusedGRPOConfig.__dataclass_fields__["use_liger_loss"]
    added: list[Any] = [(flag.name, flag.type, field(default=flag.default, metadata=flag.metadata))]
    name = f"Fused{config_class.__name__}"
    namespace: dict[str, Any] = {"__module__": config_class.__module__, "__doc__": inspect.getdoc(config_class)}
    # A method of the user's own, in whose place `dataclass` would put one; that of a hash is `None` where it has none
    for method in ("__repr__", "__eq__", "__hash__"):
        own_method = getattr(config_class, method)
        if own_method and not is_generated(inspect.unwrap(own_method)):
            namespace[method] = own_method
    return make_dataclass(name, added, bases=(_FusedConfig, config_class), namespace=namespace)


FusedRLOOConfig = fuse_config(RLOOConfig)
