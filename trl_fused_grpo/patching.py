"""`patch()`: `trl.GRPOTrainer` becomes the fused trainer, until it is undone."""

import sys
from typing import Any

import trl
from typing_extensions import Self

from .trainer import FusedGRPOTrainer


class Patch:
    """
    Handle of an installed patch. `undo()` restores what was there, and so does leaving it as a context manager. Either
    may happen more than once.
    """

    def __init__(self) -> None:
        stock = FusedGRPOTrainer.__mro__[1]
        modules = [trl, sys.modules["trl.trainer"], sys.modules[stock.__module__]]
        self._replaced: list[tuple[Any, type]] = [(module, stock) for module in modules if module.GRPOTrainer is stock]
        for module, _ in self._replaced:
            module.GRPOTrainer = FusedGRPOTrainer

    def undo(self) -> None:
        """Restore the stock trainer. Idempotent."""
        while self._replaced:
            module, stock = self._replaced.pop()
            module.GRPOTrainer = stock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def patch() -> Patch:
    """
    Make `trl.GRPOTrainer` the fused trainer for code that looks it up from now on.

    Code that imported the name before keeps the stock trainer. Patching twice is patching once. Only the class changes:
    the loss is fused where the arguments say `use_liger_loss=True` (or `use_liger_kernel=True`). Without that the
    trainer trains as stock. What a trainer did to its models is undone by [`FusedGRPOTrainer.detach`].

    Returns:
        [`Patch`]: a handle to undo it, also a context manager.
    """
    return Patch()
