"""
Finds what the user replaced on a model: forwards, hooks on modules, hooks on gradients; and code that is not known.

A forward of a library's class that was replaced counts as a change. The forward of a class of the user's own does not:
it is the model. Its code is not known, so that it is tried out before its rows lose their padding.
"""

import functools
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import is_library_function, is_library_module, replaced_calls

from .buffers import changes_buffers


# Modules of torch's whose output for a token depends on other tokens
_MIX_TOKENS = (
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.GroupNorm),
    *(torch_compat.BatchNorm, torch_compat.InstanceNorm),
)
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = torch_compat.HOOKS
_library_forwards: set[Any] = set()  # those that were looked at


def gradient_hook(model: nn.Module) -> str | None:
    """A hook on the gradient of a parameter, the user's or one that runs an optimizer, in words, or `None`."""
    for parameter in torch_compat.parameters_of(model):
        hooks, moves = torch_compat.gradient_hooks(parameter), torch_compat.has_optimizer_in_backward(parameter)
        if not hooks and not moves:
            continue
        # torch's `register_multi_grad_hook` holds the user's function in a hook of its own
        hooks += [function for hook in hooks for function in _functions_held(hook)]
        if moves or not all(map(is_library_function, hooks)):
            name = next(name for name, other in model.named_parameters() if other is parameter)
            return f"a hook on the gradient of {name}"
    return None


def _functions_held(function: Any) -> list[Any]:
    """The functions that a nested function refers to in its closure."""
    cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
    return [value for value in held if isinstance(value, (FunctionType, MethodType, functools.partial))]


def changed_head(model: nn.Module, causal_lm: PreTrainedModel, heads: Iterable[nn.Module]) -> str | None:
    """
    What the user hooked or replaced on a causal language model, on a wrapper around it, or on its output projection, in
    words, or `None`. Such code would see other outputs here than in TRL's own call.

    Args:
        model (`nn.Module`): in its wrappers.
        causal_lm (`PreTrainedModel`): the causal language model inside.
        heads (`Iterable[nn.Module]`): the output projection and its parts.
    """
    path = next(name for name, module in model.named_modules() if module is causal_lm)
    wrappers = [model]
    for name in path.split(".") if path else ():
        wrappers.append(getattr(wrappers[-1], name))
    if trl_compat.LOGPS_FROM_LOGITS:
        if not is_library_function(type(causal_lm).forward):
            return f"{type(causal_lm).__name__}.forward"
        replaced = torch_compat.replaced_in_linear()
        if replaced is not None:
            return replaced
    return _changed_in([*wrappers, *heads])


def changed_module(modules: Iterable[nn.Module]) -> str | None:
    """
    What the user hooked or replaced in these modules, in words, or `None`. Such code may depend on where a token
    stands, and so may what changes in each forward.
    """
    for hooks in torch_compat.GLOBAL_HOOKS:
        if not all(map(is_library_function, hooks.values())):
            return "a hook on every module"
    if not torch_compat.sdpa_is_own():
        return "torch.nn.functional.scaled_dot_product_attention, which was replaced,"
    modules = list(modules)
    return _changed_in(modules) or changes_buffers(modules) or _counts_tokens(modules)


def _counts_tokens(modules: Iterable[nn.Module]) -> str | None:
    counts = any(module.__dict__.get("scale_grad_by_freq") for module in modules)
    return "Embedding, which divides a gradient by the number of equal tokens in a forward," if counts else None


def _changed_in(modules: list[nn.Module]) -> str | None:
    for cls in {*map(type, modules)}:
        if _has_replaced_forward(cls):
            return f"{cls.__name__}.forward"
    for module in modules:  # thousands at every call of the model, most of them without a hook
        own = module.__dict__
        is_hooked = own[_FORWARD] or own[_FORWARD_PRE] or own[_BACKWARD] or own[_BACKWARD_PRE]
        if not (is_hooked or "forward" in own):
            continue
        hooks = [hook for name in torch_compat.HOOKS for hook in own[name].values()]
        if not all(map(is_library_function, hooks)):
            return f"a hook on {type(module).__name__}"
        if "forward" in own and not is_library_function(own["forward"], type(module).forward):
            return f"the forward of {type(module).__name__}"
    return None


def _has_replaced_forward(cls: Any) -> bool:
    """Whether a library's class has a forward that is not a library's."""
    home = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    return is_library_module(home.__module__) and not _is_library_forward(cls.forward)


def _is_library_forward(forward: Any) -> bool:
    """[`is_library_function`], looked up for a library's. The user's are not kept: they refer to data, or an error."""
    if forward not in _library_forwards and is_library_function(forward):
        _library_forwards.add(forward)
    return forward in _library_forwards


def own_class(modules: Iterable[nn.Module]) -> str | None:
    """A class among these modules whose forward is not a library's, or `None`: what it does is not known."""
    classes: set[Any] = {*map(type, modules)}
    return min((cls.__name__ for cls in classes if _has_own_forward(cls)), default=None)


def modules_of_unknown_code(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those whose forward is not a library's: they may keep something in buffers."""
    return [module for module in modules if _has_own_forward(type(module))]


def code_of(modules: Iterable[nn.Module], counts_functions: bool) -> frozenset[Any]:
    """
    The classes of a model's modules and, if they count, the user's functions that the forwards of libraries' classes
    among them call by name, in references that do not keep them. A trial of the model is one of these.
    """
    classes: set[Any] = {*map(type, modules)}
    functions = [function for cls in classes if counts_functions for _, function in replaced_calls(cls.forward)]
    return frozenset({*classes, *map(_reference, functions)})


def _reference(function: Any) -> Any:
    try:
        return ref(function)
    except TypeError:  # a class of its own may not allow that
        return id(function)


def _has_own_forward(cls: Any) -> bool:
    return "forward" in dir(cls) and not _is_library_forward(cls.forward)


def row_reader(modules: Iterable[nn.Module]) -> str | None:
    """A class of torch's among these modules that mixes the tokens of its input, or `None`."""
    names = [type(module).__name__ for module in modules if isinstance(module, _MIX_TOKENS)]
    return min(names, default=None)


def unknown_code(modules: Iterable[nn.Module]) -> str | None:
    """A class among these modules that may mix tokens: one of unknown code, or of torch's that does. Or `None`."""
    modules = list(modules)
    return own_class(modules) or row_reader(modules)


def zero_weight(modules: Iterable[nn.Module]) -> str | None:
    """
    A weight in a module of unknown code that is still all zero, or `None`. It may be a gate: as long as it is zero, a
    trial shows nothing of the code behind it. Biases are no gates, and PEFT's own zeros are known.
    """
    for module in modules:
        parts = [module] if _has_own_forward(type(module)) else []
        while parts:
            part = parts.pop()
            for name, weight in part.named_parameters(recurse=False):
                if weight.requires_grad and weight.numel() and "bias" not in name and not weight.any():
                    return f"{type(module).__name__} ({name})"
            parts += [child for child in part.children() if not type(child).__module__.startswith("peft.")]
    return None
