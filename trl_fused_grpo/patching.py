"""`patch()`: `trl.GRPOTrainer` becomes the fused trainer, until it is undone."""

import sys
from typing import Any

import trl
from typing_extensions import Self

from .trainer import FusedGRPOTrainer


class Patch:
    """
    Handle of an installed patch. Leaving it as a context manager, or `undo()`, restores what was there; both may happen
    more than once.
    """

    def __init__(self) -> None:
        stock = FusedGRPOTrainer.__mro__[1]
        homes = [trl, sys.modules["trl.trainer"], sys.modules[stock.__module__]]
        self._replaced: list[tuple[Any, type]] = [(home, stock) for home in homes if home.GRPOTrainer is stock]
        for home, _ in self._replaced:
            home.GRPOTrainer = FusedGRPOTrainer

    def undo(self) -> None:
        """Restore the stock trainer. Idempotent."""
        while self._replaced:
            home, stock = self._replaced.pop()
            home.GRPOTrainer = stock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def patch() -> Patch:
    """
    Make `trl.GRPOTrainer` the fused trainer for code that looks it up from now on.

    Names that were imported before stay what they were. Patching twice is patching once. It changes the class alone:
    the loss is fused where the arguments say `use_liger_loss=True` (or `use_liger_kernel=True`), and without that the
    trainer is the stock one.

    Returns:
        [`Patch`]: a handle to undo it, also a context manager.
    """
    return Patch()
