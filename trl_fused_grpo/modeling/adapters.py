"""PEFT's LoRA layers computed by [`lora_linear`], while a trainer's own calls of the model run."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._utils import temporary_value
from trl_fused_grpo.ops.lm_head import LowRank
from trl_fused_grpo.ops.lora_product import cast_once, lora_linear

from .forward_override import override_forward, restore_forward


logger = logging.get_logger(__name__)

_is_own_call: ContextVar[bool] = ContextVar("_is_own_call", default=False)
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = torch_compat.HOOKS


@contextmanager
def fused_adapters(modules: Iterable[nn.Module]) -> Generator[None, None, None]:
    """
    While it lasts, PEFT's LoRA layers among these modules compute their products together. From then on they do so in
    every call with gradient: layers are computed again in backward. Calls without gradient, as those of generation,
    are PEFT's.
    """
    cls = peft_compat.lora_linear_class()
    for module in modules:
        if type(module) is cls and "forward" not in vars(module):
            override_forward(module, _run_together)
    with temporary_value(_is_own_call, True):
        yield


def uninstall_adapters(modules: Iterable[nn.Module]) -> None:
    """Undo [`fused_adapters`]. Idempotent."""
    cls = peft_compat.lora_linear_class()
    for module in modules:
        if type(module) is cls:
            restore_forward(module)


def _run_together(layer: Any, original: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of PEFT's LoRA layer: the base's product and the low-rank terms of the adapters in force."""
    # The compiler joins elementwise operations by itself; `adapter_names` gives each row an adapter of its own
    if torch.compiler.is_compiling() or args or kwargs or not (torch.is_grad_enabled() or _is_own_call.get()):
        return original(x, *args, **kwargs)
    is_off = layer.disable_adapters or layer.merged
    names = [] if is_off else [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return original(_cast_for_base(layer, x))
    reason = why_not_together(layer, names, x)
    if reason is not None:
        logger.warning_once(f"PEFT computes the adapters of some layers by itself, because {reason}.")
        return original(x)
    base, terms = layer.base_layer, []
    for name in names:
        dropout = layer.lora_dropout[name]
        p = dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
        terms.append(LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], p))
    return lora_linear(x, base.weight, base.bias, terms, _product_dtype(x))


def why_not_together(layer: Any, names: list[str], x: Tensor) -> str | None:
    """
    Why PEFT must compute a LoRA layer by itself, or `None`.

    Args:
        layer (`nn.Module`): PEFT's LoRA layer around a linear one.
        names (`list[str]`): its adapters in force.
        x (`Tensor`): its input.
    """
    unknown = peft_compat.why_forward_is_not_known(type(layer))
    if unknown is not None:
        return unknown
    tensors = []
    for name in names:
        if peft_compat.has_own_way(layer, name):
            return "an adapter is more than two factors: a variant such as DoRA, or a bias"
        dropout = layer.lora_dropout[name]
        if type(dropout) not in (nn.Identity, nn.Dropout) or _is_changed(dropout):
            return f"{type(dropout).__name__}, the dropout of an adapter, is wrapped, has a hook or another forward"
        for part in (layer.lora_A[name], layer.lora_B[name]):
            if type(part) is not nn.Linear or _has_hooks_or_forward(part):
                return f"{type(part).__name__}, a factor of an adapter, is wrapped, has a hook or another forward"
            tensors.append(part.weight)
    base = layer.base_layer
    if type(base) is not nn.Linear or _has_hooks_or_forward(base):
        return f"{type(base).__name__}, which carries an adapter, is wrapped, has a hook or another forward"
    if any(torch_compat.GLOBAL_HOOKS):
        return "there is a hook on every module"
    replaced = torch_compat.replaced_in_linear()
    if replaced is not None:
        return f"{replaced} was replaced"
    tensors += [x, base.weight] if base.bias is None else [x, base.weight, base.bias]
    return _why_not_in_one_dtype(tensors, x)


def _why_not_in_one_dtype(tensors: list[Any], x: Tensor) -> str | None:
    # DTensors and quantized weights are of other classes; ZeRO-3's weights are gathered for their own module's call
    if not all(type(tensor) in _PLAIN_TENSORS and not hasattr(tensor, "ds_id") for tensor in tensors):
        return "its weights are no plain tensors when it is called"
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.is_autocast_enabled(x.device.type):
        is_known = dtypes <= {torch.float32, torch.bfloat16, torch.float16}
    else:
        is_known = len(dtypes) == 1
    return None if is_known else "without autocast its input, its weight and its adapter have several dtypes"


def _cast_for_base(layer: Any, x: Tensor) -> Tensor:
    """The input of a layer without adapters: cast once for all layers that share it, where autocast would cast it."""
    base = layer.base_layer
    is_plain = type(base) is nn.Linear and not _is_changed(base) and not any(torch_compat.GLOBAL_HOOKS)
    is_cast = is_plain and type(x) is Tensor and x.dtype == torch.float32 and not torch.is_grad_enabled()
    return cast_once(x, _product_dtype(x)) if is_cast else x


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _is_changed(module: nn.Module) -> bool:
    """Return `True` if a module has a hook, or a forward that is not that of its class's file."""
    return _has_hooks_or_forward(module) or not torch_compat.has_own_forward(type(module))


def _has_hooks_or_forward(module: nn.Module) -> bool:
    own = vars(module)  # asked for five times a layer
    is_hooked = own[_FORWARD] or own[_FORWARD_PRE] or own[_BACKWARD] or own[_BACKWARD_PRE]
    return bool(is_hooked) or "forward" in own
