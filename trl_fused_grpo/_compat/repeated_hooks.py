"""
Hooks that transformers adds again and again. From 5.0 on it hooks the input embeddings whenever checkpointing is
switched on, which TRL does after each generation: thousands in the end that all do the same, in stock too.
"""

from torch import nn
from transformers import PreTrainedModel

from .torch import modules_of


_MAKER = f"{PreTrainedModel.enable_input_require_grads.__qualname__}.<locals>."


def forget_repeated_hooks(model: nn.Module) -> None:
    """Remove all of these hooks but the last one of each module."""
    for module in modules_of(model):
        hooks = module._forward_hooks
        if not hooks:
            continue
        repeated = [key for key, hook in hooks.items() if getattr(hook, "__qualname__", "").startswith(_MAKER)]
        for key in repeated[:-1]:
            del hooks[key]
