"""Finds what a user replaced: methods of the trainer, forwards and hooks of the model, callbacks that look on."""

import functools
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from transformers import PreTrainedModel
from trl import GRPOTrainer

from trl_fused_grpo._compat import trl as trl_compat


# Libraries whose own wrappers, hooks and forwards leave a token's result what it is, wherever the token stands
LIBRARIES = {"accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "peft", "torch", "transformers", "trl"}
_PACKAGE = __name__.partition(".")[0]

# Every method of the trainer that sees a micro-batch between generation and backward
MICRO_BATCH_METHODS = (
    "training_step",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_inputs",
    "compute_loss",
    "compute_liger_loss",
    "_compute_loss",
    *trl_compat.OBJECTIVE_METHODS,
    "_get_per_token_logps_and_entropies",
)

_MIX_TOKENS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, _BatchNorm, _InstanceNorm, nn.GroupNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def _is_library(home: str) -> bool:
    """Whether a module belongs to a library or to this package, whose comparisons play the user."""
    root, _, rest = home.partition(".")
    return root in LIBRARIES or (root == _PACKAGE and not rest.startswith("parity"))


def is_library_function(function: Any, stop: Any = None) -> bool:
    """
    Whether a function was defined in one of the [`LIBRARIES`], and everything that it wraps too.

    Args:
        function (`Callable`): a function, bound method, partial or callable object.
        stop (`Callable`, *optional*): a function that counts as a library's: what a model class calls its forward.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        if function is stop:
            return True
        if isinstance(function, functools.partial):
            wrapped, function = getattr(function, "__wrapped__", None), function.func
            if wrapped is not None and not is_library_function(wrapped, stop):
                return False
            continue
        # A function's globals are those of the file that defines it; `functools.wraps` does not change them
        names = getattr(function, "__globals__", None)
        home = type(function).__module__ if names is None else names.get("__name__", "")
        if not _is_library(home):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def replaced_method(trainer: Any, names: Iterable[str]) -> str | None:
    """
    The first of these methods of a trainer that is not TRL's or this package's, as `Class.method`, or `None`. It may
    have been replaced in a subclass, on the instance, or in TRL's own class.
    """
    for name in names:
        if name in vars(trainer):
            return f"the instance's {name}"
        for cls in type(trainer).__mro__:
            method = vars(cls).get(name)
            if method is None:
                continue
            is_known = cls in GRPOTrainer.__mro__ or cls.__module__ == f"{_PACKAGE}.trainer"
            if not is_known or not is_library_function(getattr(method, "__func__", method)):
                return f"{cls.__name__}.{name}"
    return None


def replaced_behind(trainer: Any, name: str) -> str | None:
    """
    What runs where this package's trainer calls the method `name` of the class behind it, if that is not a library's:
    TRL's own class was patched, or a class of the user's stands between in the order of bases.
    """
    classes = type(trainer).__mro__
    ours = next((place for place, cls in enumerate(classes) if cls.__module__ == f"{_PACKAGE}.trainer"), -1)
    cls = next(cls for cls in classes[ours + 1 :] if name in vars(cls))
    is_known = cls in GRPOTrainer.__mro__ and is_library_function(vars(cls)[name])
    return None if is_known else f"{cls.__name__}.{name}"


def watching_callback(trainer: Any) -> str | None:
    """A callback that is called between micro-batches, where it may read gradients or move weights, or `None`."""
    handler = trainer.callback_handler
    for caller, name in ((handler, "call_event"), *((one, "on_substep_end") for one in [handler, *handler.callbacks])):
        method = getattr(caller, name, None)
        if method is not None and not is_library_function(method):
            return f"{type(caller).__name__}.{name}"
    return None


def gradient_hook(model: nn.Module) -> str | None:
    """A parameter with a hook of the user's on its gradient, or `None`."""
    for name, parameter in model.named_parameters():
        hooks = [*(parameter._backward_hooks or {}).values()]
        hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        # torch's `register_multi_grad_hook` holds the user's function in a hook of its own
        hooks += [function for hook in hooks for function in _functions_held(hook)]
        if not all(map(is_library_function, hooks)):
            return f"a hook on the gradient of {name}"
    return None


def _functions_held(function: Any) -> list[Any]:
    """The functions that a nested function refers to."""
    cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
    return [value for value in held if isinstance(value, (FunctionType, MethodType, functools.partial))]


def replaced_backward(accelerator: Any) -> bool:
    """Whether the accelerator's `backward` is not Accelerate's."""
    return not is_library_function(vars(accelerator).get("backward", type(accelerator).backward))


def changed_head(model: nn.Module, causal_lm: PreTrainedModel, heads: Iterable[nn.Module]) -> str | None:
    """
    What was hooked or replaced on a causal language model, on a wrapper around it, or on its output projection, or
    `None`. What these return in TRL's own call is not what they return here.
    """
    path = next(name for name, module in model.named_modules() if module is causal_lm)
    wrappers = [model]
    for name in path.split(".") if path else ():
        wrappers.append(getattr(wrappers[-1], name))
    if trl_compat.SCORES_THROUGH_LOGITS and not is_library_function(type(causal_lm).forward):
        return f"{type(causal_lm).__name__}.forward"
    return _changed([*wrappers, *heads])


def own_class(modules: Iterable[nn.Module]) -> str | None:
    """A class among a model's modules whose forward is no library's, or `None`: what it does is not known."""
    classes: set[Any] = {*map(type, modules)}
    names = [cls.__name__ for cls in classes if "forward" in dir(cls) and not _is_library_forward(cls.forward)]
    return min(names, default=None)


def row_reader(modules: Iterable[nn.Module]) -> str | None:
    """A class of torch's among a model's modules that mixes the tokens of its input, or `None`."""
    names = [type(module).__name__ for module in modules if isinstance(module, _MIX_TOKENS)]
    return min(names, default=None)


def zero_weight(modules: Iterable[nn.Module]) -> str | None:
    """
    A weight in a module of unknown code that is still zero, as gates begin, or `None`: what comes after it cannot be
    seen yet. Biases do not gate, and what PEFT begins with is known.
    """
    for module in modules:
        waiting = [module] if "forward" in dir(module) and not _is_library_forward(type(module).forward) else []
        while waiting:
            part = waiting.pop()
            for name, weight in part.named_parameters(recurse=False):
                if weight.requires_grad and weight.numel() and "bias" not in name and not weight.any():
                    return f"{type(module).__name__} ({name})"
            waiting += [child for child in part.children() if not type(child).__module__.startswith("peft.")]
    return None


def changed_module(modules: Iterable[nn.Module]) -> str | None:
    """What was hooked or replaced in a model, so that it may see how rows are laid out, or `None`."""
    for hooks in _GLOBAL_HOOKS:
        if not all(map(is_library_function, hooks.values())):
            return "a hook on every module"
    return _changed(modules)


def _changed(modules: Iterable[nn.Module]) -> str | None:
    modules = list(modules)
    for cls in {*map(type, modules)}:
        if not _is_own_forward(cls):
            return f"{cls.__name__}.forward"
    for module in modules:  # thousands, at every call of the model
        own = module.__dict__
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
        if not (hooked or own["_backward_pre_hooks"] or "forward" in own):
            continue
        hooks = [hook for name in _HOOKS for hook in own[name].values()]
        if not all(map(is_library_function, hooks)):
            return f"a hook on {type(module).__name__}"
        if "forward" in own and not is_library_function(own["forward"], type(module).forward):
            return f"the forward of {type(module).__name__}"
    return None


def _is_own_forward(cls: Any) -> bool:
    """Whether the forward of a library's class is a library's; a class of the user's has one of the user's."""
    home = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    return not _is_library(home.__module__) or _is_library_forward(cls.forward)


_is_library_forward = functools.lru_cache(maxsize=4096)(is_library_function)
