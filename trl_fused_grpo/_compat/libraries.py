"""
Whose code something is. It counts as the user's unless it, and everything that it wraps, is defined in a library or in
this package.
"""

import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import WeakKeyDictionary


# The libraries whose modules, hooks and forwards are known: tests train beside stock with them. vLLM's CPU build
# replaces `torch.set_num_threads`
LIBRARIES = {"accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "peft", "torch", "transformers", "trl", "vllm"}
# But of transformers the hooks of `debug="underflow_overflow"`, which are to look at what stock computes, and of torch
# that of `torch.nn.utils.spectral_norm`, which changes its buffers in each forward
_OBSERVERS = {"transformers.debug_utils", "torch.nn.utils.spectral_norm"}
# What these libraries import into their own files. Mocks are nobody's library
_IMPORTED = sys.stdlib_module_names - {"unittest"} | {
    *("PIL", "einops", "huggingface_hub", "numpy", "packaging", "safetensors", "scipy", "sympy", "tokenizers", "tqdm"),
    *("pybind11_builtins", "torchvision", "triton", "typing_extensions"),
}
_PACKAGE = __name__.partition(".")[0]

_WRAPPERS = (
    FunctionType,
    MethodType,
    functools.partial,
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
)
# Written in C, as no code of the user's is
_BUILTIN = (
    *(type, BuiltinFunctionType, ClassMethodDescriptorType, MethodDescriptorType, MethodWrapperType),
    *(WrapperDescriptorType,),
)


def is_own_module(name: str) -> bool:
    """Return `True` if a module is this package's."""
    return name.partition(".")[0] == _PACKAGE


def is_library_module(name: str) -> bool:
    """Return `True` if a module belongs to a library or to this package."""
    return (name.partition(".")[0] in LIBRARIES and name not in _OBSERVERS) or is_own_module(name)


def is_library_class(cls: type) -> bool:
    """Return `True` if a class and all its bases are a library's, or Python's own."""
    return all(is_library_module(base.__module__) or _is_imported(base.__module__) for base in cls.__mro__)


def _is_imported(module: str) -> bool:
    return module.partition(".")[0] in _IMPORTED


def is_library_function(function: Any, stop: Any = None) -> bool:
    """
    Return `True` if a function, and everything that it wraps, was defined in one of the [`LIBRARIES`] or this package.
    """
    is_wrapped = False
    while function is not None:
        function = getattr(function, "__func__", function)
        if function is stop or (is_wrapped and isinstance(function, _BUILTIN)):
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
        names, wrapped = getattr(function, "__globals__", None), getattr(function, "__wrapped__", None)
        module = type(function).__module__ if names is None else names.get("__name__", "")
        # Python's own functions wrap those of libraries, and are wrapped by them
        is_pythons = names is not None and _is_imported(module) and (is_wrapped or wrapped is not None)
        if not (is_library_module(module) or is_pythons):
            return False
        function, is_wrapped = wrapped, True
    return True


def is_library_hook(hook: Any) -> bool:
    """Return `True` if a hook is a library's, and the functions that it holds: torch wraps the user's hooks."""
    cells = getattr(getattr(hook, "__func__", hook), "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
    functions = [one for one in held if isinstance(one, (FunctionType, MethodType, functools.partial))]
    return all(map(is_library_function, [hook, *functions]))


# What `torch.compile` puts into the file of what it has compiled, for that alone to find
_OF_COMPILER = ("__compiled_fn_", "__resume_at_")


def replaced_name(namespace: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """
    One of some names in the namespace of a library's file, class or object under which somebody has put code of theirs,
    or `None`.
    """
    for name in names:
        if name.startswith(_OF_COMPILER):
            continue
        value = namespace[name]
        if isinstance(value, _WRAPPERS) or (callable(value) and not isinstance(value, _BUILTIN)):
            for attribute in ("fget", "func", "__func__"):
                value = getattr(value, attribute, value)
            if not _is_known(value):
                return name
    return None


# What files and classes held when all of it was last found to be a library's
_looked_through: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def replaced_in(owner: type | ModuleType, but: Collection[str] = ()) -> str | None:
    """
    [`replaced_name`] of all that a library's file or class holds, `but` for some names. One that holds the same objects
    as when nothing was found is not looked through again: together they hold thousands, in each step.
    """
    values, before = [*vars(owner).values()], _looked_through.get(owner, ())
    if len(values) == len(before) and all(map(is_, values, before)):
        return None
    name = replaced_name(vars(owner), [name for name in vars(owner) if name not in but])
    if name is None:
        _looked_through[owner] = values
    return name


def _is_known(function: Any) -> bool:
    """[`is_library_function`], or a function that libraries import."""
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return is_library_function(function) or (_is_imported(module) and not hasattr(function, "__wrapped__"))
