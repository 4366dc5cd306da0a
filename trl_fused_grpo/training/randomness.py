"""
Why two forwards of a sequence give other log-probs: random numbers that library modules draw, or the rows beside it.
And the states of the generators, which a comparison or a second attempt leaves as they were.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat


# What every module has: parts, weights, hooks, none of them an option
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def why_forwards_differ(model: nn.Module, with_adapters: bool = True) -> str | None:
    """
    Why two forwards of the same rows give different numbers in training, or `None`: library modules draw at random.

    Args:
        model (`nn.Module`): in its wrappers or bare.
        with_adapters (`bool`): whether its adapters are on.
    """
    modules = torch_compat.modules_of(model)
    if not with_adapters:
        not_called = peft_compat.dropouts_of_adapters(modules)
        modules = [module for module in modules if module not in not_called]
    for module in modules:
        if _drops_out(module):
            return f"dropout ({_name_in(model, module)}) makes two forwards differ"
        if (noise := model_compat.noise_of(module)) is not None:
            return f"{noise} makes two forwards differ"
        if (option := _noise_option(_own(module)) if module.training else None) is not None:
            return f"dropout ({_name_in(model, module)}.{option}) makes two forwards differ"
    config = getattr(model, "config", None)
    option = _noise_option(config.to_dict()) if model.training and hasattr(config, "to_dict") else None
    return f"dropout ({option}) makes two forwards differ" if option else None


def why_rows_depend_on_others(model: nn.Module) -> str | None:
    """
    Why log-probs of a sequence depend on which are beside it, or `None`: TRL shuffles the sequences of a generation
    batch after it has computed them.
    """
    configs = [module.config for module in torch_compat.modules_of(model) if isinstance(module, PreTrainedModel)]
    return next(filter(None, map(architecture.why_rows_depend_on_others, configs)), None)


def _drops_out(module: nn.Module) -> bool:
    """
    Return `True` if a module is a dropout that is on: torch's, or another of that name, as of PEFT's OFT and BOFT.
    """
    is_dropout = isinstance(module, torch_compat.Dropout) or "Dropout" in type(module).__name__
    if not (is_dropout and module.training):  # thousands, of which few have a `p`
        return False
    probability = getattr(module, "p", None)
    return isinstance(probability, (int, float)) and probability > 0


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _name_in(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)


def _noise_option(options: dict[str, Any]) -> str | None:
    """
    The first option of a configuration, of one nested in it, or of a module that draws random numbers: a probability of
    dropout, a strength of router jitter. Attention passes its dropout to a function, each family by its own name.
    PEFT's LoHa and LoKr keep theirs by the name of the adapter.
    """
    for name, value in options.items():
        if isinstance(value, dict):
            nested = _noise_option(value)
            if nested is not None:
                return nested
            is_on = any(isinstance(one, float) and one > 0 for one in value.values())
        else:
            is_on = isinstance(value, float) and value > 0
        names_noise = is_on and any(word in str(name) for word in ("drop", "jitter"))
        if names_noise and name not in architecture.DROPOUTS_OF_OTHER_HEADS:
            return name
    return None


class RandomStates:
    """
    States of the random number generators of the CPU and of a tensor's device.

    Args:
        like (`Tensor`): on the device.
    """

    def __init__(self, like: Tensor):
        self._device = like.device
        self._cpu_state = torch.get_rng_state()
        self._device_state = torch.cuda.get_rng_state(self._device) if like.is_cuda else None

    def restore(self) -> None:
        """Set the generators to what they were."""
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            torch.cuda.set_rng_state(self._device_state, self._device)


@contextmanager
def random_states_kept(like: Tensor) -> Generator[None, None, None]:
    """Afterwards random numbers go on as if nothing had been drawn."""
    before = RandomStates(like)
    try:
        yield
    finally:
        before.restore()
