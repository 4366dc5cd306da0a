"""Small context managers and a decorator that several modules need."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast


T = TypeVar("T")


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


def shown_as(function: T) -> Callable[[Any], T]:
    """Decorate a function that takes the arguments of another with the other's signature, for editors too."""
    return cast(Any, wraps(cast(Any, function)))
