"""PEFT's adapters by name."""

from dataclasses import fields
from typing import Any

from transformers.utils import is_peft_available

from .case import MARK, SkippedError


_LORA: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    "head-copy": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "tied-copy": {
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "dropout": {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3},
    "alora": {"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [MARK]},
}
_OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix-tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


def adapter_config(name: str) -> Any:
    """
    The configuration of an adapter, see [`Case`].

    Raises:
        [`SkippedError`]:
            When PEFT is not installed or is too old for it.
    """
    if not is_peft_available():
        raise SkippedError("peft is not installed")
    import peft

    kind, options = _OTHER.get(name) or ("LoraConfig", {"r": 4, **_LORA[name]})
    missing = options.keys() - {option.name for option in fields(getattr(peft, kind))}
    if missing:
        raise SkippedError(f"this PEFT has no `{missing.pop()}`")
    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)
