"""
The options of trainers whose arguments do not say them: those of the patches in force (`patching.py`), and how an
option is read from text, as command lines give it.
"""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from .config import FusedOptions


# Options of the patches in force, the latest last
PATCHES: list[dict[str, Any]] = []

_TYPES: dict[str, Any] = get_type_hints(FusedOptions)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Options under their names, refused where there is no such option or it cannot have that value.

    Raises:
        `ValueError`: naming the option, and those that there are or the values that it may have.
    """
    for name in options:
        if name not in _TYPES:
            raise ValueError(f"there is no option {name!r}. The options are {', '.join(_TYPES)}.")
    FusedOptions(**options)
    return dict(options)


def patched_options() -> FusedOptions | None:
    """The options of all patches in force, of which a later one wins over an earlier; `None` without a patch."""
    if not PATCHES:
        return None
    return FusedOptions(**{name: value for options in PATCHES for name, value in options.items()})


def fused_loss_of(args: Any) -> tuple[bool, FusedOptions]:
    """
    Return whether a trainer that is made now has the fused loss, and the options that its arguments do not have.

    Args:
        args (`GRPOConfig`, *optional*): its arguments. Where they do not say `use_liger_loss`, `use_liger_kernel` and
            the patches decide.
    """
    patched = patched_options()
    is_on = getattr(args, "use_liger_loss", None)
    if is_on is None:
        is_on = patched is not None or getattr(args, "use_liger_kernel", False)
    is_on = bool(is_on)
    return is_on, patched if patched and is_on else FusedOptions()


def _read_bool(text: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]


_READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (_read_bool, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
}


def read_option(name: str, text: str) -> Any:
    """
    The value of an option that was given as text. `none` is `None` where the option may be that.

    Raises:
        `ValueError`: when there is no such option or it cannot have that value; the message says what it may be.
    """
    kinds = get_args(_TYPES.get(name)) or (_TYPES.get(name, str),)
    if NoneType in kinds and text.lower() in ("none", "null"):
        return None
    read, expected = _READERS[next(kind for kind in kinds if kind is not NoneType)]
    try:
        value = read(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {expected}, not {text!r}.") from None
    return checked_options({name: value})[name]
