"""
Projections that share an input (queries, keys and values; a gate and what it gates) have it cast once. Under autocast
each casts it for itself, and its gradients are cast back one by one and added up.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.ops.layer_functions import SharedCast

from .as_read import AsRead


_LINEAR = nn.functional.linear
_MOST_ELEMENTS = 2**31  # of a tensor


class SharedInput:
    """
    The input of several modules, cast for all of them. How many will ask for it is what was seen the last time, when
    each cast it for itself.
    """

    def __init__(self) -> None:
        self._source: Any = _nothing  # refers to the tensor whose casts are handed out
        self._version = -1
        self._casts: list[Tensor] = []
        self._first: nn.Module | None = None
        self._uses = 0
        self._seen: dict[nn.Module, int] = {}

    def forget(self) -> None:
        """Let go of casts that nobody asked for: one may have raised before."""
        self._source, self._casts = _nothing, []

    def cast(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input of a module as autocast would cast it, or as it is where that is left to autocast."""
        if type(x) is not Tensor or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return x
        device = x.device.type
        is_cast = torch.is_autocast_enabled(device) and 0 < x.numel() < _MOST_ELEMENTS and not x.is_inference()
        if not is_cast or nn.functional.linear is not _LINEAR:
            return x
        if self._source() is x and self._version == x._version:
            self._uses += 1
            if self._first is not None:
                self._seen[self._first] = max(self._uses, self._seen[self._first])
            return self._casts.pop() if self._casts else x
        self._source, self._version, self._casts = weakref.ref(x), x._version, []
        self._first, self._uses = module, 1
        count = self._seen.setdefault(module, 1)
        if count == 1:
            return x
        first, *others = SharedCast.apply(x, torch.get_autocast_dtype(device), count)
        self._casts = others[::-1]
        return first


def _nothing() -> None:
    return None


class ProjectionForward:
    """
    The forward of a projection whose input may be that of others.

    Args:
        module (`nn.Linear`): the projection.
        shared ([`SharedInput`]): of all projections of the same module.
    """

    needs_compiler = False

    def __init__(self, module: nn.Module, shared: SharedInput):
        self.module, self.shared = module, shared
        self._read = AsRead(module)

    def may_run(self) -> bool:
        """Whether the projection still runs the forward of its class."""
        return self._read.holds()

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # a copy that is made meanwhile has that of its class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            args = (self.shared.cast(self.module, args[0]),)
        return type(self.module).forward(self.module, *args, **kwargs)


def projections_in(module: nn.Module) -> Iterator[ProjectionForward]:
    """Of a layer, each projection beside which its module has another. Experts are none."""
    projections = [part for part in module.children() if type(part) is nn.Linear]
    if len(projections) > 1 and torch_compat.has_own_forward(nn.Linear):
        shared = SharedInput()
        yield from (ProjectionForward(projection, shared) for projection in projections)
    for part in module.children():
        if not isinstance(part, nn.ModuleList):
            yield from projections_in(part)
