"""What is known of PEFT's LoRA layer for `nn.Linear`, which need not be installed."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from . import torch as torch_compat


# What PEFT 0.17 to 0.21 look at in the layer's forward. A release whose forward looks at more may compute more
_NAMES_IN_FORWARD = {
    *("VARIANT_KWARG_KEYS", "_cast_input_dtype", "_check_forward_args", "_mixed_batch_forward", "active_adapters"),
    *("base_layer", "disable_adapters", "dtype", "forward", "keys", "lora_A", "lora_B", "lora_dropout"),
    *("lora_variant", "merged", "pop", "scaling", "to", "unmerge", "weight"),
}


def lora_linear_class() -> Any:
    """PEFT's LoRA layer around an `nn.Linear`, or `None` where nobody has imported PEFT."""
    module = sys.modules.get("peft.tuners.lora.layer")
    return getattr(module, "Linear", None)


def why_forward_is_not_known(cls: Any) -> str | None:
    """Why PEFT's LoRA layer may compute something else than base and low-rank terms, or `None`."""
    if not torch_compat.has_own_forward(cls):
        return f"the forward of PEFT's {cls.__name__} was replaced"
    if not _NAMES_IN_FORWARD.issuperset(cls.forward.__code__.co_names):
        return "this version of PEFT computes LoRA in a way that is not known"
    return None


def has_own_way(layer: Any, adapter: str) -> Any:
    """Whether an adapter of a LoRA layer is more than two factors and a scale: DoRA and other variants, a bias."""
    # PEFT keeps `use_dora` for old code alone
    is_dora = getattr(layer, "use_dora", {}).get(adapter)
    return adapter in layer.lora_variant or is_dora or layer.lora_bias.get(adapter)


def dropouts_of_adapters(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Of some modules the dropouts of LoRA, which a disabled adapter does not call."""
    found = [module._modules.get("lora_dropout") for module in modules]
    return {dropout for dropouts in found if dropouts is not None for dropout in dropouts.children()}
