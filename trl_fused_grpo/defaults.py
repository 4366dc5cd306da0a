"""
The options of trainers whose arguments do not say them: those of the patches in force (`patching.py`), and how an
option is read from text, as command lines give it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .options import FusedOptions, check_option, type_of


# Options of the patches in force, the latest last
PATCHES: list[dict[str, Any]] = []


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their names, refused where there is no such option or it cannot have that value."""
    for name, value in options.items():
        if name not in FusedOptions.__dataclass_fields__:
            known = ", ".join(FusedOptions.__dataclass_fields__)
            raise ValueError(f"there is no option {name!r}. The options are {known}.")
        check_option(name, value)
    return dict(options)


def patched_options() -> FusedOptions | None:
    """The options of all patches in force, of which a later one wins over an earlier; `None` without a patch."""
    if not PATCHES:
        return None
    return FusedOptions(**{name: value for options in PATCHES for name, value in options.items()})


def fused_loss_of(args: Any) -> tuple[bool, FusedOptions]:
    """
    Return whether a fused trainer that is made now has the fused loss, and the options that its arguments do not have.
    """
    said = getattr(args, "use_liger_loss", None)
    is_on = said is None or bool(said)
    return is_on, (patched_options() if is_on else None) or FusedOptions()


# As transformers' parser reads them
_BOOLS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)


def _read_bool(text: str) -> bool:
    return _BOOLS[text.lower()]


_READERS: dict[type, Callable[[str], Any]] = {bool: _read_bool, int: int, float: float, str: str}


def read_option(name: str, text: str) -> Any:
    """The value of an option that was given as text. `none` is `None` where the option may be that."""
    kind, may_be_none = type_of(name) if name in FusedOptions.__dataclass_fields__ else (str, False)
    try:
        value = None if may_be_none and text.lower() in ("none", "null") else _READERS[kind](text)
    except (KeyError, ValueError):
        value = text  # refused below
    return checked_options({name: value})[name]
