"""PEFT, which need not be installed: which adapters are on, and what merging them leaves in the weights."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from trl.trainer.utils import use_adapter

from trl_fused_grpo._utils import temporary_attr

from . import torch as torch_compat
from .models import is_peft_model, is_prompt_learning


def dropouts_of_adapters(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Of some modules the dropouts of LoRA, which a disabled adapter does not call."""
    found = [module._modules.get("lora_dropout") for module in modules]
    return {dropout for dropouts in found if dropouts is not None for dropout in dropouts.children()}


def adapter_state(model: nn.Module) -> tuple[bool, tuple[str, ...]] | None:
    """Return whether PEFT's adapters are off, and which are active otherwise; `None` without adapters."""
    modules = torch_compat.modules_of(model)
    wrappers = (module for module in modules if hasattr(type(module), "get_base_model"))
    peft_model: Any = next(filter(is_peft_model, wrappers), None)
    if peft_model is not None and is_prompt_learning(peft_model):
        # It adapts no layer. Switched off, PEFT calls the model inside; its flag for that is newer than PEFT 0.17
        return peft_model.forward == peft_model.base_model.forward, tuple(peft_model.active_adapters)
    # Transformers' models have methods of this name
    named: Any = (module for module in modules if hasattr(type(module), "disable_adapters"))
    layer = next((module for module in named if isinstance(module.disable_adapters, bool)), None)
    if layer is None:
        return None
    # A wrapper of PEFT's around one module knows of those adapters alone that the module has
    knows_all: Any = layer if peft_model is None else peft_model.base_model
    return bool(layer.disable_adapters), tuple(knows_all.active_adapters)


@contextmanager
def adapters_as(model: nn.Module, state: tuple[bool, tuple[str, ...]] | None) -> Generator[None, None, None]:
    """While it lasts, a model's adapters are as [`adapter_state`] has found them at another time."""
    if state is None or state == adapter_state(model):
        yield
        return
    disabled, active = state
    peft_model: Any = next(module for module in model.modules() if is_peft_model(module))
    now = list(peft_model.active_adapters)
    if disabled or len(active) == len(now) == 1:
        with use_adapter(peft_model, None if disabled else active[0]):
            yield
        return
    tuner = peft_model.base_model  # whose method takes several names, which TRL's way back does not
    tuner.set_adapter(list(active))
    try:
        yield
    finally:
        tuner.set_adapter(now)


@contextmanager
def base_weights_kept(peft_model: Any) -> Generator[None, None, None]:
    """
    While it lasts, weights that adapters were merged into are to the bit what they were when these are taken out again.
    PEFT alone subtracts what it had added, which rounds: so here in 8 bits, and after a merge that was cut short.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    merge, unmerge = peft_model.merge_adapter, peft_model.unmerge_adapter
    kept: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []

    def merge_adapter(*args: Any, **options: Any) -> None:
        for layer in torch_compat.modules_of(peft_model):
            if not isinstance(layer, BaseTunerLayer) or layer.merged:
                continue
            base = layer.get_base_layer()
            weights = {name: weight for name, weight in base._parameters.items() if weight is not None}
            if not any(hasattr(weight, "SCB") for weight in weights.values()):  # whose scales PEFT makes anew
                kept.extend((base, name, weight, weight.detach().clone()) for name, weight in weights.items())
        merge(*args, **options)

    def unmerge_adapter() -> None:
        unmerge()
        for base, name, weight, before in kept:
            base._parameters[name] = weight  # quantized weights are made anew
            weight.data.copy_(before)
        kept.clear()

    with (
        temporary_attr(peft_model, "merge_adapter", merge_adapter),
        temporary_attr(peft_model, "unmerge_adapter", unmerge_adapter),
    ):
        yield
