"""
`patch()`: every `GRPOTrainer`, `RLOOTrainer` and `AsyncGRPOTrainer` that is made gets the fused loss, until undone.

TRL's classes have a `__new__` of this module for good, which no instance keeps. It makes the fused trainer of what was
imported from TRL before a patch, and says where `use_liger_loss` is not heeded.
"""

import inspect
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import trl
from transformers.utils import logging
from typing_extensions import Self

from ._compat.trainers import is_config_class, trl_class
from .options import PATCHES, checked_options, fused_loss_of
from .rloo import FusedRLOOTrainer
from .trainer import FusedGRPOTrainer, FusedTrainerMixin


logger = logging.get_logger(__name__)

# TRL's trainers, each with the fused one
_FUSED: dict[Any, type] = {trl_class(cls): cls for cls in (FusedGRPOTrainer, FusedRLOOTrainer)}


def _rename(is_patched: bool) -> None:
    """Let TRL's names for its trainers stand for the fused ones or its own, where nobody else has replaced them."""
    for stock, fused in _FUSED.items():
        old, new = (stock, fused) if is_patched else (fused, stock)
        for module in _homes(stock):
            if getattr(module, stock.__name__) is old:
                setattr(module, stock.__name__, new)


def _homes(stock: Any) -> list[Any]:
    """The modules that have one of TRL's trainers under its name, the first the one that users import it from."""
    package = stock.__module__.rpartition(".")[0]
    modules = (trl, sys.modules[package], sys.modules[stock.__module__])
    return [module for module in modules if hasattr(module, stock.__name__)]


def _know_async() -> None:
    """Know `AsyncGRPOTrainer` too, where TRL has it with the interface that is known here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is experimental: nobody has asked for it yet
            from .async_grpo import FusedAsyncGRPOTrainer
    except ImportError:
        return
    stock = trl_class(FusedAsyncGRPOTrainer)
    if stock not in _FUSED:
        _FUSED[stock] = FusedAsyncGRPOTrainer
        _install_new(stock)


class Patch:
    """
    Handle of an installed patch. `undo()` takes it back, and so does leaving it as a context manager. Either may happen
    more than once, and patches may be undone in any order.

    Attributes:
        trainers_made (`int`): trainers of TRL and their subclasses that were made in this process, fused or not.
    """

    trainers_made = 0

    def __init__(self, options: dict[str, Any]):
        self._options = checked_options(options)
        _know_async()
        PATCHES.append(self._options)
        _rename(is_patched=True)
        for stock, fused in _FUSED.items():
            home = _homes(stock)[0]
            found = getattr(home, stock.__name__)
            if found is not fused:
                logger.warning_once(
                    f"patch() leaves {home.__name__}.{stock.__name__} as it is: it was replaced by {found.__module__}."
                    f"{found.__qualname__} before. Patch before that."
                )

    def undo(self) -> None:
        """Take the patch back; with the last one, TRL's names are TRL's trainers again. Idempotent."""
        PATCHES[:] = [options for options in PATCHES if options is not self._options]
        if not PATCHES:
            _rename(is_patched=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def patch(**options: Any) -> Patch:
    """
    Give every `GRPOTrainer` and `RLOOTrainer` that is made from now on the fused loss, also one with TRL's plain
    `GRPOConfig` or `RLOOConfig`. With TRL 1.16 the same holds for its experimental `AsyncGRPOTrainer`.

    ```python
    import trl
    from trl_fused_grpo import patch

    with patch(fused_share_prompts=False):
        args = trl.GRPOConfig(output_dir="out")
        trainer = trl.GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset)
    ```

    `trl.GRPOTrainer` is [`FusedGRPOTrainer`] while the patch lasts, `trl.RLOOTrainer` is [`FusedRLOOTrainer`], and
    TRL's own classes, where code has imported them before, make instances of these. What the arguments say themselves
    wins: `use_liger_loss=False`, and options of a config that has them. A subclass that was defined before the patch
    trains as stock, which is logged once; one that is defined meanwhile stays a subclass of the fused trainer. A
    trainer keeps what it got when it was made. What it did to its models is undone by
    [`FusedGRPOTrainer.detach`].

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
    """With TRL's own trainers under their names, whatever patches are in force around it."""
    kept, PATCHES[:] = [*PATCHES], []
    _rename(is_patched=False)
    try:
        yield
    finally:
        PATCHES[:] = kept
        if kept:
            _rename(is_patched=True)


def _new(stock: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    """`__new__` of a trainer of TRL: the fused trainer where a patch asks for it."""
    config: Any = next((one for one in (*args, *kwargs.values()) if is_config_class(type(one))), None)
    fused = _FUSED[stock]
    is_made = bool(args or kwargs)  # a copy of a trainer is made without arguments
    Patch.trainers_made += is_made
    if is_made and not issubclass(cls, (FusedTrainerMixin, fused)):
        if PATCHES and fused_loss_of(config)[0]:
            if cls is stock:
                cls = fused
            else:
                logger.warning_once(
                    f"{cls.__name__} was defined before trl_fused_grpo.patch() and trains with TRL's own loss: patch "
                    f"before the class is defined, or derive it from {fused.__name__}."
                )
        elif getattr(config, "use_liger_loss", None):
            logger.warning_once(
                f"use_liger_loss=True has no effect on {cls.__name__}: {fused.__name__} alone heeds it. Make that one, "
                "or call trl_fused_grpo.patch() before."
            )
    make = super(stock, cls).__new__
    return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)


def _install_new(stock: Any) -> None:
    """Give a class of TRL's its `__new__`, for good: Python cannot take a `__new__` away from a class."""
    new: Any = partial(_new, stock)
    new.__signature__ = inspect.signature(stock.__init__)  # what a class shows
    stock.__new__ = staticmethod(new)


for _stock in _FUSED:
    _install_new(_stock)
