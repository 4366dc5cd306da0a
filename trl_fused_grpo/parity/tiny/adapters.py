"""PEFT adapters by the name that a case gives them."""

from dataclasses import fields
from typing import Any

from transformers.utils import is_peft_available


ATTENTION: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
# The class of the configuration, and its options
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("LoraConfig", ATTENTION),
    "head": ("LoraConfig", {**ATTENTION, "target_modules": ["q_proj", "v_proj", "lm_head"]}),
    # A trained copy of the output projection
    "head-copy": ("LoraConfig", {**ATTENTION, "modules_to_save": ["lm_head"]}),
}


def adapter_config(name: str) -> Any:
    """
    The configuration of an adapter, by its name in `ADAPTERS`.

    Raises:
        `ImportError`:
            When PEFT is not installed or is too old for the adapter.
    """
    if not is_peft_available():
        raise ImportError("peft is not installed")
    import peft

    kind, options = ADAPTERS[name]
    missing = options.keys() - {option.name for option in fields(getattr(peft, kind))}
    if missing:
        raise ImportError(f"this PEFT has no `{missing.pop()}`")
    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)
