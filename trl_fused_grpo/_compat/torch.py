"""Private names of torch. `required` refuses a torch that lost one of them."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import attention
from torch.nn.attention import flex_attention as flex
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations
from torch.utils import _python_dispatch

from trl_fused_grpo._utils import walks_once

from . import required as required  # first: it names what is gone
from .libraries import is_library_class, is_library_function


# What torch's `varlen_attn` calls in the end: its wrappers take longer than the kernel at 4000 tokens of a small model
flash_attention = torch.ops.aten._flash_attention_forward.default
# The names of its random states differ between torch 2.6 and 2.7, their places do not
flash_attention_backward = torch.ops.aten._flash_attention_backward.default


def flash_attention_name() -> str:
    """Names torch's own, or what `torch.nn.attention.activate_flash_attention_impl` has put in its place."""
    current = getattr(attention, "current_flash_attention_impl", lambda: None)  # torch >= 2.11
    return current() or "torch's FlashAttention"


# Its kernel for float32 and for heads of any width, which torch gives `scaled_dot_product_attention` alone. Of its
# masks the one in which the last query of a sequence stands at the last key
efficient_attention = torch.ops.aten._efficient_attention_forward.default
CAUSAL_FROM_THE_LAST_KEY = 2
# Autograd calls it without the window of the forward
efficient_attention_backward = torch.ops.aten._efficient_attention_backward.default

# Flex attention: `None` where it was not tried (torch < 2.9)
flex_attention: Any = flex.flex_attention if hasattr(flex, "AuxRequest") else None
BlockMask: Any = flex.BlockMask

# The classes that torch's own dropouts and normalisations of all dimensions have in common
Dropout, BatchNorm, InstanceNorm = dropout._DropoutNd, batchnorm._BatchNorm, instancenorm._InstanceNorm
# What `torch.nn.utils.parametrizations.spectral_norm` puts on a weight. It changes its buffers in each forward
SpectralNorm = parametrizations._SpectralNorm

# The attributes in which a module keeps its hooks, and the hooks of every module
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


@walks_once
def modules_of(root: nn.Module) -> list[nn.Module]:
    """List `root.modules()` in a tenth of its time."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting += reversed(module._modules.values())
    return list(found)


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """List `root.parameters()`, as fast."""
    found = {parameter: None for module in modules_of(root) for parameter in module._parameters.values()}
    return [parameter for parameter in found if parameter is not None]


def replaced_in_linear() -> str | None:
    """The part of torch's linear layer that somebody replaced, in words, or `None`."""
    if getattr(nn.Linear.forward, "__globals__", {}).get("__name__") != nn.Linear.__module__:
        return "the forward of torch.nn.Linear"
    function = nn.functional.linear
    is_own = function is torch._C._nn.linear or is_library_function(function)
    return None if is_own else "torch.nn.functional.linear"


def sdpa_is_own() -> bool:
    """Return `True` if nobody has replaced `torch.nn.functional.scaled_dot_product_attention`."""
    return nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hooks on the gradient of a parameter: before it is accumulated, and after."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if not (before or after):  # of thousands of parameters
        return []
    return [hook for table in (before, after) for hook in (table or {}).values()]


def has_optimizer_in_backward(parameter: Tensor) -> bool:
    """
    Return `True` if torch's `_apply_optimizer_in_backward` moves a parameter as soon as it has its gradient. Its hook
    is on the node of the graph that accumulates this, which does not tell its hooks.
    """
    return hasattr(parameter, "_in_backward_optimizers")


def without_compiler(module: Any) -> Any:
    """The module inside the one that `torch.compile` has made of it, or the module itself."""
    return module._modules.get("_orig_mod", module)  # of thousands of modules


def is_compiled(module: nn.Module) -> bool:
    """Return `True` if a module was made by `torch.compile`, or runs compiled in place (`module.compile()`)."""
    return without_compiler(module) is not module or module._compiled_call_impl is not None


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return `True` if a module computes the one in it again in backward, as FSDP's activation checkpointing has it."""
    return isinstance(module, checkpoint_wrapper.CheckpointWrapper)


def without_fsdp1(module: Any) -> Any:
    """The module inside FSDP1's wrapper, whose own forward gathers weights, or the module itself. FSDP2 wraps none."""
    return module._fsdp_wrapped_module if isinstance(module, FullyShardedDataParallel) else module


def is_fsdp2(module: nn.Module) -> bool:
    """Return `True` if FSDP2 gathers the weights of a module by hooks on its call."""
    return isinstance(module, FSDPModule)


def let_share_code(layer: nn.Module) -> None:
    """Let torch compile one code for all layers of a kind: it makes one for each module that FSDP2 has marked."""
    if "_is_fsdp_managed_module" in vars(layer):  # at its first call
        for module in modules_of(layer):
            vars(module).pop("_is_fsdp_managed_module", None)


def inductor(graph: Any, example_inputs: Any) -> Any:
    """
    The backend of `torch.compile` that makes kernels, for a part of a model that the rest does not know to be compiled:
    its saved tensors are not overwritten in backward, so that this may run twice, as that of the rest may.
    """
    # To import the compiler takes seconds
    from torch._functorch import config
    from torch._guards import TracingContext
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {"joint_custom_pre_pass": _refusing_random_numbers()}
    # A kernel of sums over rows and over columns counts rows behind the last (pytorch#195845): gradients of norms were
    # NaN. Whether there is one depends on the number of tokens, too, and each side of a limit is compiled by itself
    if hasattr(inductor_config.triton, "mix_order_reduction"):  # older torch has none
        patches["triton.mix_order_reduction"] = False
    # A graph out of the cache may have been compiled to overwrite them. Kernels are cached all the same
    with config.patch(donated_buffer=False, enable_autograd_cache=False):
        compiled = compile_fx(graph, example_inputs, config_patches=patches)
    context: Any = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if metadata is not None:
        metadata.bw_donated_idxs = []  # `None`, which is there now, counts as some that are overwritten
    return compiled


class _DrawsRandomNumbersError(RuntimeError):
    pass


@functools.cache
def _refusing_random_numbers() -> Any:
    """
    A pass of Inductor's that raises for a layer with dropout that is computed again in backward: it would drop other
    numbers there (pytorch#190758).
    """
    from torch._functorch import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RefusingRandomNumbers(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            has_backward = any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
            if has_backward and config.activation_memory_budget < 1:
                operations = {node.target for node in graph.nodes} - {flash_attention}  # called without dropout
                if any(torch.Tag.nondeterministic_seeded in getattr(one, "tags", ()) for one in operations):
                    raise _DrawsRandomNumbersError

        def uuid(self) -> str:
            return "trl_fused_grpo.RefusingRandomNumbers"

    return RefusingRandomNumbers()


# Kinds of tensors, adapters and modes of gradients for which a layer is compiled; those that come later are not
MOST_VARIANTS = 24


@contextmanager
def compiled_with(budget: float) -> Generator[None, None, None]:
    """
    While it lasts, what is compiled keeps for backward this share of what it would keep at most, and is not split at
    the buckets of the DDP whose forward runs.
    """
    from torch._dynamo import config
    from torch._functorch import config as functorch_config
    from torch.fx.experimental import _config as shapes

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # torch < 2.7
    # A module's number, as an epsilon, would become a tensor on the CPU: for it C++ is compiled, and all of it twice
    changes: dict[str, Any] = {"optimize_ddp": False, "specialize_float": True, limit: MOST_VARIANTS}
    memory = functorch_config.patch(activation_memory_budget=budget)
    # Else sizes that are equal once, as of sequences and of shared tokens, must be equal always
    own_sizes = shapes.patch(use_duck_shape=False)  # ty: ignore[missing-attribute] - torch adds it
    with config.patch(changes), memory, own_sizes:
        yield


@functools.cache
def compiler_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises where it cannot compile; nothing of what the compiled code itself raises."""
    from torch._dynamo import exc

    # torch < 2.7 has another name for too many compilations of one function
    too_many = [vars(exc)[name] for name in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit") if name in vars(exc)]
    return exc.TorchDynamoException, *too_many


def draws_random_numbers(error: Exception) -> bool:
    """Return `True` if a layer was not compiled because its backward would draw its random numbers anew."""
    return isinstance(getattr(error, "inner_exception", error), _DrawsRandomNumbersError)


def compiler_is_off() -> bool:
    """Return `True` if `torch.compile` is switched off in this process, as `TORCHDYNAMO_DISABLE=1` does."""
    from torch._dynamo import config

    return bool(config.disable)


@contextmanager
def autograd_within_operation() -> Generator[None, None, None]:
    """While it lasts, operations within a custom operation, which runs below autograd, build a graph."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def matmuls_are_tf32() -> bool:
    """Return `True` if float32 matmuls on CUDA are rounded to TF32."""
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch >= 2.9, where the line below raises once this was set
        return matmul.fp32_precision == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def dtype_of_products(accelerator: Any, model: Any) -> torch.dtype:
    """In what a model's products are computed in a training: in Accelerate's mixed precision, or in the model's own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, model.dtype)


def operations_are_seen() -> bool:
    """
    Return `True` if a mode sees every operation that runs, as one that counts FLOPs: the compiler does not work under
    it.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on this process: of its own shard, where it is a DTensor."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


def foreign_mode() -> str | None:
    """A mode that is on, sees every function or operation and is not a library's, in words, or `None`."""
    modes = [*overrides._get_current_function_mode_stack(), *_python_dispatch._get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not is_library_class(type(mode))]
    return f"{names[0]}, a mode that sees every operation," if names else None
