"""Whether a module, or a function, is still what was read of it when it was made a function of tensors."""

import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .module_functions import CONSTANTS, constants_of, functionals_of, homes_of, is_changed, methods_of


class AsRead:
    """
    Tells whether a module is still what was read of it: its class, the methods of that, the functions of
    `torch.nn.functional` that these call, its constants and its parts.

    Args:
        module (`nn.Module`): the module. Hooks of its own do not count.
        names (`Iterable[str]`, *optional*): of the parts that were read, by default all.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None = None):
        read = module._modules if names is None else {name: module._modules[name] for name in names}
        self.module = module
        self._parts = [inner for part in read.values() if part is not None for inner in part.modules()]
        self._classes = [(owner, type(owner)) for owner in (module, *self._parts)]
        self._values: list[tuple[Mapping[str, Any], str, Any]] = [(module._modules, *item) for item in read.items()]
        for part in self._parts:
            self._values += [(part._modules, *item) for item in part._modules.items()]
        for owner, _ in self._classes:
            own, without = vars(owner), owner._parameters
            for name in [name for name, _ in constants_of(owner) if name != "training"]:
                self._values.append((own, name, own[name]) if name in own else (without, name, None))
        for cls in {cls for _, cls in self._classes}:
            self._values += [(vars(nn.functional), *item) for item in functionals_of(cls)]
            names_in_class = [name for name, _ in methods_of(cls)]
            self._values += [
                (vars(home), name, vars(home).get(name)) for home in homes_of(cls) for name in names_in_class
            ]

    def change(self) -> str | None:
        """What was replaced since, in words, or `None`."""
        name = type(self.module).__name__
        if "forward" in vars(self.module):
            return f"{name} has a forward of its own"
        for owner, cls in self._classes:
            if type(owner) is not cls:
                return f"{cls.__name__} has become {type(owner).__name__}"
        for home, attribute, value in self._values:
            if not _is_same(home.get(attribute), value):
                where = "torch.nn.functional" if home is vars(nn.functional) else name
                return f"`{attribute}` of {where} was replaced"
        changed = next(filter(is_changed, self._parts), None)
        return None if changed is None else f"{type(changed).__name__} in {name} has hooks or another forward"


class StandIn:
    """
    What stands in the place of a module's forward while the module is what was read of it.

    Args:
        module (`nn.Module`): the module.
        names (`Iterable[str]`, *optional*): of the parts that were read, by default all.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None = None):
        self.module = module
        self._read = AsRead(module, names)

    def change(self) -> str | None:
        """
        Which forward, part, function or constant of the module is another one since, in words; `None` while this may
        stand in its place.
        """
        return self._read.change()

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # a copy made meanwhile has nothing of its own yet: that of its class


class GlobalsAsRead:
    """
    Tells whether the functions that a function calls by their names in its file are still the same, and those that
    these call.

    Args:
        function (`Callable`): the function.
    """

    def __init__(self, function: Any):
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        waiting, seen = [function], set()
        while waiting:
            current = waiting.pop()
            if not isinstance(current, types.FunctionType) or current in seen:
                continue
            seen.add(current)
            for name in current.__code__.co_names:
                value = current.__globals__.get(name)
                if isinstance(value, types.FunctionType):
                    self._values.append((current.__globals__, name, value))
                    waiting.append(value)

    def holds(self) -> bool:
        """Whether they are."""
        return all(home.get(name) is value for home, name, value in self._values)


def _is_same(found: Any, value: Any) -> bool:
    return found is value or (type(found) is type(value) and isinstance(value, CONSTANTS) and found == value)
