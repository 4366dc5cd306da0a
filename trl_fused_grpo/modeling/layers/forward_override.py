"""The `forward` of one module, replaced and put back, beside the replacements and wrappers of others."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def override_forward(module: nn.Module, override: Callable) -> None:
    """
    Have a module run `override(module, original, *args, **kwargs)` as its forward. Idempotent: a module that has an
    override keeps it, also where something was wrapped around it since.
    """
    if is_override(module.forward):
        return
    class_forward, own_forward = type(module).forward, vars(module).get("forward")

    @functools.wraps(class_forward)
    def forward(self, *args, **kwargs):
        # Of the class of `self`, which may be a deep copy of the module
        original = functools.partial(type(self).forward, self) if own_forward is None else own_forward
        return override(self, original, *args, **kwargs)

    marked: Any = forward
    # `generate` checks its arguments against the signature; who looks for a replaced forward follows `__wrapped__`
    marked.__signature__ = inspect.signature(class_forward)
    marked.__wrapped__ = class_forward if own_forward is None else own_forward
    marked._override, marked._own_forward = marked, own_forward
    module.forward = types.MethodType(marked, module)


def is_override(forward: Callable) -> bool:
    """
    Return `True` if a forward is one that [`override_forward`] has put there, whatever was wrapped around it since.
    """
    return hasattr(forward, "_override")


def restore_forward(module: nn.Module) -> None:
    """
    Undo [`override_forward`]: the module has the forward of its class again, or the one of its own that it had.
    Idempotent.

    A forward that was wrapped around since, as Accelerate's mixed precision does when a training begins, is left in its
    wrapper, where it runs the override.
    """
    installed: Any = getattr(vars(module).get("forward"), "__func__", None)
    if installed is None or getattr(installed, "_override", None) is not installed:
        return
    if installed._own_forward is None:
        del module.forward
    else:
        module.forward = installed._own_forward
