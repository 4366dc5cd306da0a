"""Private names of torch. `required` refuses a torch that lost one of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.modules import module as torch_module

from . import required as required  # first: it names what is gone


# What torch's `varlen_attn` calls in the end: its wrappers take longer than the kernel at 4000 tokens of a small model
flash_attention = torch.ops.aten._flash_attention_forward.default

# The classes that torch's own dropouts and normalisations of all dimensions have in common
Dropout, BatchNorm, InstanceNorm = dropout._DropoutNd, batchnorm._BatchNorm, instancenorm._InstanceNorm

# The attributes in which a module keeps its hooks, and the hooks of every module
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hooks on the gradient of a parameter: before it is accumulated, and after."""
    tables: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [hook for table in tables for hook in (table or {}).values()]


def without_compiler(module: Any) -> Any:
    """The module inside the one that `torch.compile` has made of it, or the module itself."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was made by `torch.compile`, or runs compiled in place (`module.compile()`)."""
    return without_compiler(module) is not module or module._compiled_call_impl is not None


def without_fsdp1(module: Any) -> Any:
    """The module inside FSDP1's wrapper, whose own forward gathers weights, or the module itself. FSDP2 wraps none."""
    return module._fsdp_wrapped_module if isinstance(module, FullyShardedDataParallel) else module
