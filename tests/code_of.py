"""Functions of a test that count as a library's: a training that is looked at through them stays what it is."""

from types import FunctionType


def as_code_of(module, function):
    """The same function, as if a module of a library had defined it, for which its name (`"torch"`) is enough."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, "__name__": module},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, module
    return copy
