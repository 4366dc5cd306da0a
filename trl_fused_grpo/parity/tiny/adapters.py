"""PEFT adapters by the name that a case gives them."""

from dataclasses import fields
from typing import Any

from transformers.utils import is_peft_available

from .families import MARKER_ID


_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
_LORA: dict[str, dict[str, Any]] = {
    "attention": _ATTENTION,
    "head": {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    "head-copy": {**_ATTENTION, "modules_to_save": ["lm_head"]},  # a trained copy of the output projection
    "tied-copy": {**_ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "dropout": {**_ATTENTION, "lora_dropout": 0.3},
    "alora": {**_ATTENTION, "alora_invocation_tokens": [MARKER_ID]},
}
_OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix-tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


def adapter_config(name: str) -> Any:
    """
    The configuration of an adapter.

    Args:
        name (`str`):
            `"attention"`: LoRA on the attention projections. `"head"`: LoRA on the output projection too.
            `"head-copy"`: LoRA on the attention projections and a trained copy of the output projection
            (`modules_to_save`). `"tied-copy"`, `"dropout"`, `"alora"`: further kinds of LoRA. `"prompt-tuning"`,
            `"prefix-tuning"`, `"ia3"`: PEFT's other methods.

    Raises:
        `ImportError`:
            When PEFT is not installed or is too old for the adapter.
    """
    if not is_peft_available():
        raise ImportError("peft is not installed")
    import peft

    kind, options = _OTHER.get(name) or ("LoraConfig", {"r": 4, **_LORA[name]})
    missing = options.keys() - {option.name for option in fields(getattr(peft, kind))}
    if missing:
        raise ImportError(f"this PEFT has no `{missing.pop()}`")
    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)
