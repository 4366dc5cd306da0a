"""
Projections that share an input (queries, keys and values; a gate and what it gates) have it cast once. Under autocast
each casts it for itself, and its gradients are cast back one by one and added up.
"""

import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.utils import logging

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.ops.layer_functions import SharedCast

from .as_read import StandIn
from .layer_kernels import MOST_ELEMENTS


logger = logging.get_logger(__name__)


class _Round:
    """
    Uses of one tensor, the first of which was `first`'s.

    Args:
        x (`Tensor`): the tensor.
        first (`nn.Module`): who asked for it first.
        dtype (`torch.dtype`): what it is cast to.
        count (`int`): how many uses are expected.
    """

    def __init__(self, x: Tensor, first: nn.Module, dtype: torch.dtype, count: int):
        self.first, self.uses = first, 0
        self._x, self._state = ref(x), _state(x, dtype)
        self._casts: list[Tensor] = list(SharedCast.apply(x, dtype, count))[::-1] if count > 1 else []

    def is_of(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether a cast of the tensor would be the same, with the same gradient."""
        return self._x() is x and self._state == _state(x, dtype)

    def next(self, x: Tensor) -> Tensor:
        """The next cast, or the tensor itself where no more uses were expected."""
        self.uses += 1
        return self._casts.pop() if self._casts else x


def _state(x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    # Another thread may run the same model
    in_grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.requires_grad, x.grad_fn
    return dtype, x._version, threading.get_ident(), *in_grad


class SharedInput:
    """
    The input of several modules, cast for all of them. How many will ask for it is how many did in the last round that
    the same one began; in the first each casts it for itself.
    """

    def __init__(self) -> None:
        self._round: _Round | None = None
        self._seen: dict[nn.Module, int] = {}

    def forget(self) -> None:
        """End a round. Casts that nobody asked for are let go: somebody may have raised before."""
        if self._round is not None:
            self._seen[self._round.first] = self._round.uses
        self._round = None

    def cast(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input of a module as autocast would cast it, or as it is where that is left to autocast."""
        device = x.device.type
        if not (torch.is_autocast_enabled(device) and _may_be_shared(x)):
            return x
        dtype, current = torch.get_autocast_dtype(device), self._round
        if current is None or not current.is_of(x, dtype):
            self.forget()
            current = self._round = _Round(x, module, dtype, self._seen.get(module, 1))
        return current.next(x)


def _may_be_shared(x: Tensor) -> bool:
    if type(x) is not Tensor or x.dtype != torch.float32 or not 0 < x.numel() < MOST_ELEMENTS or x.is_inference():
        return False
    if x.is_leaf and x.requires_grad and torch.is_autocast_cache_enabled():
        return False  # autocast keeps the cast of a leaf, and adds the gradients of its uses in the lower precision
    is_watched = torch_compat.operations_are_seen() or torch_compat.functions_are_seen()
    return not (is_watched or torch.compiler.is_compiling())


class ProjectionForward(StandIn):
    """
    The forward of a projection whose input may be that of others.

    Args:
        module (`nn.Linear`): the projection.
        shared ([`SharedInput`]): of all projections of the same module.
    """

    def __init__(self, module: nn.Module, shared: SharedInput):
        super().__init__(module)
        self.shared = shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = type(self.module.weight) in (Tensor, nn.Parameter)  # one of another class may compute in its own way
        if len(args) == 1 and not kwargs and is_plain and isinstance(args[0], Tensor):
            args = (self.shared.cast(self.module, args[0]),)
        return type(self.module).forward(self.module, *args, **kwargs)


def projections_in(module: nn.Module) -> Iterator[ProjectionForward]:
    """
    Of a layer, each projection beside which its module has another. Experts are none, and neither are the factors of
    several adapters, which lie in a dictionary.
    """
    projections = [part for part in module.children() if type(part) is nn.Linear]
    replaced = torch_compat.replaced_in_linear()
    if replaced is not None:
        logger.warning_once(f"Projections cast an input one by one, because {replaced} was replaced.")
    elif len(projections) > 1:
        shared = SharedInput()
        yield from (ProjectionForward(projection, shared) for projection in projections)
    for part in module.children():
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from projections_in(part)
