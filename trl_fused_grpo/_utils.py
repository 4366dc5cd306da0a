"""What several modules need: context managers, a decorator, and how processes tell one another of their batches."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor


T = TypeVar("T")
M = TypeVar("M")


@contextmanager
def temporary_value(variable: ContextVar[T], value: T) -> Generator[None, None, None]:
    """While it lasts, a context variable has a value. Afterwards it has the one before."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def temporary_attr(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    """While it lasts, the attribute `name` of an object is `value`. Afterwards it is what it was, or the class's."""
    own = vars(owner)
    has_own, previous = name in own, own.get(name)
    try:
        setattr(owner, name, value)
        yield
    finally:
        if has_own:
            setattr(owner, name, previous)
        elif name in own:
            delattr(owner, name)


@contextmanager
def temporary_mode(modules: Iterable[Any], training: bool) -> Generator[None, None, None]:
    """While it lasts, these modules are in training, or in evaluation. Nobody's `train()` is called."""
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, mode in before:
            module.training = mode


_walks: ContextVar[dict[Any, Any] | None] = ContextVar("_walks", default=None)


@contextmanager
def modules_as_they_are(walks: dict[Any, Any] | None = None) -> Generator[None, None, None]:
    """
    While it lasts, nobody replaces a module: what [`walks_once`] decorates walks each model once. With the `walks` of a
    time before, nobody has since then.
    """
    of_now = next(known for known in (walks, _walks.get(), {}) if known is not None)
    with temporary_value(_walks, of_now):
        yield


def walks_once(walk: Callable[[M], T]) -> Callable[[M], T]:
    """Decorate a function that walks a model: adapters make thousands of modules, walked several times."""

    @wraps(walk)
    def walk_once(root: M) -> T:
        walks = _walks.get()
        if walks is None:
            return walk(root)
        if (walk, root) not in walks:
            walks[walk, root] = walk(root)
        return walks[walk, root]

    return walk_once


def shown_as(function: T) -> Callable[[Any], T]:
    """Decorate a function that takes the arguments of another with the other's signature, for editors too."""
    return cast(Any, wraps(cast(Any, function)))


def of_all_processes(accelerator: Any, what: str, values: list[int] | list[bool]) -> Tensor:
    """
    Numbers of each process `[processes, n]`. FSDP and ZeRO-3 gather weights whenever the model is called, so that all
    must choose the same layout and call it as often.
    """
    if accelerator.num_processes == 1:
        return torch.tensor([values])
    mine = torch.tensor([[crc32(what.encode()), *values]], dtype=torch.long, device=accelerator.device)
    everyone = accelerator.gather(mine).cpu()
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise RuntimeError(
            f"Processes of this training are at different places: this one tells the others of its {what}, and they "
            "tell something else. What you hook, replace or change in the middle of an accumulation window must be the "
            "same on all processes."
        )
    return everyone[:, 1:]


def on_any_process(accelerator: Any, what: str, condition: bool) -> bool:
    """Return `True` if a condition holds on any process. All of them ask for the same, see [`of_all_processes`]."""
    return bool(of_all_processes(accelerator, what, [condition]).any())
