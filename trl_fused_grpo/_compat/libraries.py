"""
Whose code a function is. It counts as the user's unless it, and every function that it wraps, is defined in a library
or in this package.
"""

import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

from torch.nn import functional


# Libraries whose wrappers, hooks and forwards do not make a token's result depend on where the token stands
LIBRARIES = {"accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "peft", "torch", "transformers", "trl"}
# But of transformers the hooks of `debug="underflow_overflow"`, which are to look at what stock computes, and of torch
# that of `torch.nn.utils.spectral_norm`, which changes its buffers in each forward
_OBSERVERS = {"transformers.debug_utils", "torch.nn.utils.spectral_norm"}
_PACKAGE = __name__.partition(".")[0]


def is_own_module(name: str) -> bool:
    """
    Whether a module is this package's. The cases in `parity` do what users do, so that their code counts as the user's.
    """
    root, _, rest = name.partition(".")
    return root == _PACKAGE and not rest.startswith("parity")


def is_library_module(name: str) -> bool:
    """Whether a module belongs to a library or to this package."""
    return (name.partition(".")[0] in LIBRARIES and name not in _OBSERVERS) or is_own_module(name)


def is_library_function(function: Any, stop: Any = None) -> bool:
    """
    Whether a function was defined in one of the [`LIBRARIES`] or in this package, and everything that it wraps too.

    Args:
        function (`Callable`): a function, bound method, partial or callable object.
        stop (`Callable`, *optional*): a function that counts as a library's wherever it was defined: the forward of a
            module's class, whose own code is not a replacement.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        if function is stop:
            return True
        if isinstance(function, functools._lru_cache_wrapper):
            function = function.__wrapped__
            continue
        if isinstance(function, functools.partial):
            wrapped, function = getattr(function, "__wrapped__", None), function.func
            if wrapped is not None and not is_library_function(wrapped, stop):
                return False
            continue
        # A function's globals are those of the file that defines it; `functools.wraps` does not change them
        names = getattr(function, "__globals__", None)
        module = type(function).__module__ if names is None else names.get("__name__", "")
        if not is_library_module(module):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def replaced_calls(function: Any) -> Iterator[tuple[str, Any]]:
    """
    The names and values of functions that a function calls by their names, in a library's file that it belongs to or in
    `torch.nn.functional`, and that are the user's now.
    """
    function = inspect.unwrap(getattr(function, "func", function))  # of a `functools.partial`
    code, own_file = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    homes = [own_file, vars(functional)] if is_library_module(own_file.get("__name__", "")) else [vars(functional)]
    for name in () if code is None else code.co_names:
        for home in homes:
            called = home.get(name)
            is_function = callable(called) and not isinstance(called, (type, BuiltinFunctionType))
            if is_function and not is_library_function(called):
                yield name, called
