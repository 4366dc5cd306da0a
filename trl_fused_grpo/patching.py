"""
`patch()`: every `GRPOTrainer` that is made gets the fused loss, until it is undone.

TRL's class has a `__new__` of this module for good, which no instance keeps. It makes the fused trainer of what was
imported as `GRPOTrainer` before a patch, and says where `use_liger_loss` is not heeded.
"""

import inspect
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import trl
from transformers.utils import logging
from trl import GRPOConfig
from typing_extensions import Self

from .defaults import PATCHES, checked_options, fused_loss_of, read_options
from .trainer import FusedGRPOTrainer


logger = logging.get_logger(__name__)

# What switches the patch on in processes that nobody can edit; `startup/` reads it too
VARIABLE = "TRL_FUSED_GRPO"

_STOCK: Any = next(cls for cls in FusedGRPOTrainer.__mro__ if cls.__module__.startswith("trl."))
_MODULES: list[Any] = [trl, sys.modules["trl.trainer"], sys.modules[_STOCK.__module__]]


def _rename(old: type, new: type) -> None:
    """Let TRL's name for its trainer stand for another class, where nobody else has replaced it."""
    for module in _MODULES:
        if module.GRPOTrainer is old:
            module.GRPOTrainer = new


class Patch:
    """
    Handle of an installed patch. `undo()` takes it back, and so does leaving it as a context manager. Either may happen
    more than once, and patches may be undone in any order.
    """

    def __init__(self, options: dict[str, Any]):
        self._options = checked_options(options)
        PATCHES.append(self._options)
        _rename(_STOCK, FusedGRPOTrainer)
        if trl.GRPOTrainer is not FusedGRPOTrainer:
            logger.warning_once(
                f"patch() leaves trl.GRPOTrainer as it is: it was replaced by {trl.GRPOTrainer.__module__}."
                f"{trl.GRPOTrainer.__qualname__} before. Patch before that."
            )

    def undo(self) -> None:
        """Take the patch back; with the last one, TRL's name is TRL's trainer again. Idempotent."""
        PATCHES[:] = [options for options in PATCHES if options is not self._options]
        if not PATCHES:
            _rename(FusedGRPOTrainer, _STOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def patch(**options: Any) -> Patch:
    """
    Give every `GRPOTrainer` that is made from now on the fused loss, also one with TRL's plain `GRPOConfig`.

    `trl.GRPOTrainer` is [`FusedGRPOTrainer`] while the patch lasts, and TRL's own class, where code has imported it
    before, makes instances of it. What the arguments say themselves wins: `use_liger_loss=False`, and options of a
    config that has them. A subclass that was defined before the patch trains as stock, which is logged once; one that
    is defined meanwhile stays a subclass of the fused trainer, whose loss is off after the patch. A trainer keeps what
    it got when it was made. What it did to its models is undone by [`FusedGRPOTrainer.detach`].

    Args:
        options:
            Options of [`FusedGRPOConfig`] for configs that do not have them: `fused_*` and `kl_estimator`. Of several
            patches the latest one that names an option decides it.

    Returns:
        [`Patch`]: a handle to undo it, also a context manager.

    Raises:
        `ValueError`: when there is no such option or it cannot have that value; the message names it.
    """
    return Patch(options)


@contextmanager
def unpatched() -> Generator[None, None, None]:
    """With TRL's own trainer under its name, whatever patches are in force around it."""
    kept, PATCHES[:] = [*PATCHES], []
    _rename(FusedGRPOTrainer, _STOCK)
    try:
        yield
    finally:
        PATCHES[:] = kept
        if kept:
            _rename(_STOCK, FusedGRPOTrainer)


def patch_from_environment() -> Patch | None:
    """
    Patch as the variable `TRL_FUSED_GRPO` says: `1`, or options such as `fused_layout=packed,fused_compile=true`.
    `None` where it is empty, `0` or not set.

    Raises:
        `ValueError`: when it says something else; the message says what.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() in ("", "0", "false", "no", "off"):
        return None
    try:
        return patch(**({} if text.lower() in ("1", "true", "yes", "on") else read_options(text)))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error} Set it to 1, to options or to 0.") from None


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`GRPOTrainer.__new__`: the fused trainer where a patch asks for it."""
    config: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, GRPOConfig)), None)
    is_fused = any(base.__module__ == FusedGRPOTrainer.__module__ for base in cls.__mro__)
    if (args or kwargs) and not is_fused:  # a copy of a trainer is made without arguments
        if PATCHES and fused_loss_of(config)[0]:
            if cls is _STOCK:
                cls = FusedGRPOTrainer
            else:
                logger.warning_once(
                    f"{cls.__name__} was defined before trl_fused_grpo.patch() and trains with TRL's own loss: patch "
                    "before the class is defined, or derive it from FusedGRPOTrainer."
                )
        elif getattr(config, "use_liger_loss", None):
            logger.warning_once(
                f"use_liger_loss=True has no effect on {cls.__name__}: FusedGRPOTrainer alone heeds it. Make that one, "
                "or call trl_fused_grpo.patch() before."
            )
    make = super(_STOCK, cls).__new__
    return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)


def _install_new() -> None:
    """Give TRL's class its `__new__`, for good: Python cannot take a `__new__` away from a class."""
    _new.__signature__ = inspect.signature(_STOCK.__init__)  # ty: ignore[missing-attribute] - what a class shows
    _STOCK.__new__ = staticmethod(_new)


_install_new()
