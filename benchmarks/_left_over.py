"""What a training leaves behind: everything of this package that stands in places which outlive a training step."""

import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


PACKAGE = "trl_fused_grpo"
_FUNCTIONS = (FunctionType, MethodType, partial)
_CONTAINERS = (dict, list, set, deque, Counter, WeakKeyDictionary, WeakSet)


def is_ours(value: Any) -> bool:
    """Whether a function, a bound or partial one, or an object is of this package."""
    for inner in ("__func__", "func"):
        value = getattr(value, inner, value)
    names = (getattr(value, "__globals__", {}).get("__name__"), type(value).__module__)
    return any(str(name).split(".")[0] == PACKAGE for name in names)


def left_over(trainer: Any) -> dict[str, Any]:
    """
    What the package, and torch by its doing, have in place now. Two trainings leave the same, however each has ended.

    Args:
        trainer (`GRPOTrainer`): stock or fused, that does not train now.
    """
    model = trainer.model
    return {
        "in modules": sorted(
            f"{name}.{key}"
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in ("_modules", "_parameters", "_buffers") and is_ours(value)
        ),
        "checkpoint functions": sorted(
            name
            for name, module in model.named_modules()
            if is_ours(getattr(module, "_gradient_checkpointing_func", None))
        ),
        "hooks": sum(map(_hooks, model.modules())),
        "tables": sorted(name for name in _attention_names() if is_ours(ALL_ATTENTION_FUNCTIONS[name])),
        "masks": _masks(),
        "files": sorted(_in_files()),
        "trainer": sorted(key for key, value in vars(trainer).items() if is_ours(value)),
        "accelerator": sorted(key for key, value in vars(trainer.accelerator).items() if is_ours(value)),
        "arguments": {key: repr(value) for key, value in vars(trainer.args).items()},
        "beta": trainer.beta,
        "gradients on": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "modes": len(_get_current_function_mode_stack()) + len(_get_current_dispatch_mode_stack()),
        "saved tensors' hooks": _saved_tensors_hooks(),
        "contexts": sorted(_contexts_that_are_set()),
    }


def _saved_tensors_hooks() -> bool:
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - no module of its own to a type checker
    return autograd._top_saved_tensors_default_hooks(False) is not None


def _attention_names() -> list[str]:
    return list(ALL_ATTENTION_FUNCTIONS.valid_keys())


def _masks() -> list[str]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    return sorted(name for name in MASKS.valid_keys() if is_ours(MASKS[name]))


def _hooks(module: nn.Module) -> int:
    """How many hooks of this package a module has; transformers adds some of its own at each start of a training."""
    tables = [value for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)]
    return sum(is_ours(hook) for table in tables for hook in table.values())


def _in_files() -> Iterator[str]:
    """Functions of this package in the files of transformers' models."""
    for name, file in list(sys.modules.items()):
        if name.startswith("transformers.models.") and file is not None:
            # Of other objects, placeholders for what needs a library that is missing raise at any attribute
            functions = [(key, value) for key, value in vars(file).items() if isinstance(value, _FUNCTIONS)]
            yield from (f"{name}.{key}" for key, value in functions if is_ours(value))


def _our_modules() -> list[Any]:
    return [file for name, file in sys.modules.items() if name.split(".")[0] == PACKAGE and file is not None]


def _contexts_that_are_set() -> Iterator[str]:
    for file in _our_modules():
        for key, value in vars(file).items():
            if isinstance(value, ContextVar) and value.get(None):
                yield f"{file.__name__}.{key}"


def sizes_of_caches(trainer: Any) -> dict[str, int]:
    """
    How many entries each container of the package has: those of its modules, its functions' caches, and those of the
    objects that belong to the trainer.
    """
    sizes: dict[str, int] = {}
    for file in _our_modules():
        for key, value in vars(file).items():
            name = f"{file.__name__}.{key}"
            if hasattr(value, "cache_info"):
                sizes[name] = value.cache_info().currsize
            elif isinstance(value, _CONTAINERS):
                sizes[name] = len(value)
            elif type(value).__module__.split(".")[0] == PACKAGE:
                sizes.update(_sizes_in(value, name))
    return {**sizes, **_sizes_in(getattr(trainer, "_fused", None), "trainer")}


def _sizes_in(start: Any, name: str) -> dict[str, int]:
    """Of an object and of what it refers to, as far as that is of this package."""
    sizes, seen, waiting = {}, set(), [(name, start)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen or type(value).__module__.split(".")[0] != PACKAGE or isinstance(value, type):
            continue
        seen.add(id(value))
        for key, part in (getattr(value, "__dict__", None) or {}).items():
            if isinstance(part, _CONTAINERS):
                sizes[f"{name}.{key}"] = len(part)
            waiting.append((f"{name}.{key}", part))
    return sizes
