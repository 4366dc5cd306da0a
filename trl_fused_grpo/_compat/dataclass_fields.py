"""Adds a field to a dataclass of another library, in place."""

import inspect
from dataclasses import Field, dataclass
from typing import Any


# The methods that `dataclass` generates. It does not generate one anew where the class has it already
_GENERATED = ("__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__")


def is_generated(method: Any) -> bool:
    """Return `True` if `dataclass` made a method: such a one has no source file."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _regenerate(cls: type) -> None:
    """Apply `dataclass` to a class once more, in place, so that its methods know the fields that it has now."""
    own, params = vars(cls)["__dataclass_fields__"], vars(cls)["__dataclass_params__"]
    for name in inspect.get_annotations(cls):
        if name in own and not isinstance(vars(cls).get(name), Field):
            setattr(cls, name, own[name])
    for name in _GENERATED:
        method: Any = vars(cls).get(name)
        # `dataclass` wraps a `__repr__` in a guard against recursion
        if is_generated(inspect.unwrap(method) if name == "__repr__" else method):
            delattr(cls, name)
    dataclass(**{name: getattr(params, name) for name in ("init", "repr", "eq", "order", "unsafe_hash")})(cls)


def _descendants(cls: type) -> list[type]:
    """Subclasses of every depth, each after those that it inherits from."""
    found = {sub for child in cls.__subclasses__() for sub in (child, *_descendants(child))}
    return sorted(found, key=lambda sub: len(sub.__mro__))  # a class has more ancestors than any of them


def add_field(cls: Any, name: str, of_type: Any, new: Any) -> None:
    """Add a field to a dataclass in place, and to the dataclasses that inherit from it."""
    cls.__annotations__[name] = of_type
    setattr(cls, name, new)
    _regenerate(cls)
    for subclass in _descendants(cls):
        if "__dataclass_fields__" in vars(subclass):  # a subclass that is no dataclass inherits the methods
            _regenerate(subclass)
