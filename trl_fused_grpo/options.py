"""
The options that this package adds to TRL's: names, defaults and what each may be; those of the patches in force
(`patching.py`), and how one is read from text, as command lines give it. It imports nothing heavy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints


LAYOUTS = ("packed", "padded")
BACKWARD_MODES = ("forecast", "recompute")
KL_ESTIMATORS = ("k1", "k2", "k3", "k4")  # of `loss/objective.py`


def _option(default: Any, told: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with what argument parsers know of it."""
    return field(default=default, metadata={"help": told, **({"choices": list(choices)} if choices else {})})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# What values an option may have, by its name or its type: in words, and whether one is such a value
_RULES: dict[Any, tuple[list[str], Callable[[Any], bool]]] = {
    bool: (["True", "False"], lambda value: isinstance(value, bool)),
    int: (["a whole number from 0 on"], lambda value: _is_number(value) and isinstance(value, int) and value >= 0),
    float: (["a positive number"], lambda value: _is_number(value) and value > 0),
    "fused_memory": (["a fraction above 0 and at most 1"], lambda value: _is_number(value) and 0 < value <= 1),
}


@dataclass
class FusedOptions:
    """
    The options of [`FusedGRPOConfig`] beside `use_liger_loss`. What each does is said there. `None` always means that
    the training decides: it is the default where there is something to decide.

    Raises:
        `ValueError`: when an option has a value that it cannot have; the message names both, and what is allowed.
    """

    fused_compile: bool | None = _option(
        None, "Compile the decoder layers of the text model with torch.compile. By default on CUDA."
    )
    fused_memory: float | None = _option(
        None, "Fraction of the device's memory to take for speed. By default no more than TRL takes."
    )
    fused_max_tokens_per_forward: int | None = _option(
        None,
        "Tokens of the micro-batches that run together; 0 runs each alone. By default as many as fit TRL's memory.",
    )
    fused_verify: int = _option(
        0, "Compare log-probs with TRL's own path every so many optimizer steps; 0: in the first step alone."
    )
    kl_estimator: str = _option("k3", "Estimator of the KL divergence.", KL_ESTIMATORS)
    # Rarely needed
    fused_layout: str | None = _option(
        None, "How the sequences of a micro-batch are laid out. By default as the model allows.", LAYOUTS
    )
    fused_backward: str | None = _option(
        None, "How gradients of a trained output projection are built. By default the cheaper way.", BACKWARD_MODES
    )
    fused_logits_mib: float | None = _option(
        None, "Memory for one chunk of logits, in MiB. By default it follows from the shapes."
    )
    fused_skip_old_logps: bool | None = _option(
        None, "Take old log-probs from the training forward until the weights move. By default where possible."
    )
    fused_skip_zero_grad_sequences: bool = _option(False, "Leave sequences that receive no gradient out of the model.")
    fused_share_prompts: bool = _option(
        True, "Run a prompt through the model once for its completions in a packed forward."
    )
    fused_keep_base_weights: bool = _option(
        False, "Keep the weights under adapters to the bit when these are merged into them for vLLM."
    )

    @classmethod
    def from_args(cls, args: Any, defaults: "FusedOptions | None" = None) -> "FusedOptions":
        """
        Read the options of a trainer.

        Args:
            args (`GRPOConfig`): its arguments.
            defaults ([`FusedOptions`], *optional*): what holds where they have no such field, as TRL's own.
        """
        known = vars(defaults or FusedOptions())
        values = {name: getattr(args, name, default) for name, default in known.items()}
        values["kl_estimator"] = kl_estimator_of(args, known["kl_estimator"])
        return FusedOptions(**values)

    def __post_init__(self):
        for option in fields(FusedOptions):
            check_option(option.name, getattr(self, option.name))

    @property
    def forces_rows(self) -> bool:
        """Return `True` if packed rows were asked for: the user's word that unknown model code may have them."""
        return self.fused_layout == "packed"


BASIC_OPTIONS = tuple(FusedOptions.__dataclass_fields__)[:5]  # those before the comment
_HINTS: dict[str, Any] = get_type_hints(FusedOptions)


def type_of(name: str) -> tuple[type, bool]:
    """The type of an option's values, and whether it may be `None` too."""
    kinds = get_args(_HINTS[name]) or (_HINTS[name],)
    return kinds[0], NoneType in kinds


def _rule(name: str) -> tuple[list[str], Callable[[Any], bool]]:
    kind, may_be_none = type_of(name)
    choices = FusedOptions.__dataclass_fields__[name].metadata.get("choices")
    words, allows = _RULES.get(name) or _RULES.get(kind, ([], bool))
    if choices:
        words, allows = [f'"{choice}"' for choice in choices], choices.__contains__
    return (["None", *words], lambda value: value is None or allows(value)) if may_be_none else (words, allows)


def allowed_values(name: str) -> str:
    """The values that an option may have, in words."""
    *others, last = _rule(name)[0]
    return f"{', '.join(others)} or {last}" if others else last


def check_option(name: str, value: Any) -> None:
    """Refuse a value that an option cannot have."""
    if not _rule(name)[1](value):
        raise ValueError(f"{name} must be {allowed_values(name)}, not {value!r}.")


def kl_estimator_of(args: Any, default: str = "k3") -> str:
    """The option `kl_estimator`. A field of that name in a class of the user's may mean something else to them."""
    if not isinstance(args, FusedOptions) and any("kl_estimator" in vars(cls) for cls in type(args).__mro__):
        return default
    return getattr(args, "kl_estimator", default)


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


def read_option(name: str, text: str) -> Any:
    """The value of an option that was given as text. `none` is `None` where the option may be that."""
    kind, may_be_none = type_of(name)
    try:
        if may_be_none and text.lower() in ("none", "null"):
            value = None
        else:
            value = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = text  # refused below
    check_option(name, value)
    return value
