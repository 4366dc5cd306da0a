"""
Which functions of a model's layers have a kernel. A function is known by the operations that it is made of: those of a
formula in `layer_functions`, whatever class it belongs to and however it is written.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.ops import layer_functions
from trl_fused_grpo.ops.layer_functions import GATED_KINDS, Gated, RMSNorm, Rotary


Kernel = Callable[..., Any]
# What is computed is the same whichever comes first
_COMMUTATIVE = {torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 32768  # of a norm: a row is held by one program
_MOST_ELEMENTS = 2**31  # of a tensor


class KernelFunction:
    """
    A function of tensors that runs in a kernel, where it is one of those that have any.

    Args:
        name (`str`): what it is.
        function (`Callable`): takes tensors.
        find (`Callable`): the kernel of a function that is called with such tensors, or `None`.
    """

    needs_compiler = False

    def __init__(self, name: str, function: Callable, find: Callable[..., Kernel | None]):
        self.name, self.function, self._find = name, function, find
        self._found: dict[Any, Kernel | None] = {}

    def __call__(self, tensors: tuple[Tensor, ...], original: Callable[[], Any]) -> Any:
        """The function of these tensors by its kernel, or what `original` returns."""
        if not _can_run(tensors):
            return original()
        # Under autocast the model's operations are those of other dtypes only where autocast knows them: none of these
        key = tuple([(tensor.dtype, tensor.shape[-1], len(tensor.shape)) for tensor in tensors])
        if key not in self._found:
            self._found[key] = self._find(self.function, tensors)
        kernel = self._found[key]
        return original() if kernel is None else kernel(*tensors)


def norm_function(name: str, function: Callable) -> KernelFunction | None:
    """A norm by its kernel, `None` where it has none."""
    has_kernel = norm_kernel(function, (torch.empty(1, 1, 8, dtype=torch.bfloat16), torch.empty(8))) is not None
    return KernelFunction(name, function, norm_kernel) if has_kernel else None


def gated_function(name: str, function: Callable) -> KernelFunction | None:
    """What is between the projections of an MLP by its kernel, `None` where it has none."""
    has_kernel = gated_kernel(function, tuple(torch.empty(2, 1, 1, 8, dtype=torch.bfloat16))) is not None
    return KernelFunction(name, function, gated_kernel) if has_kernel else None


def has_rotary_kernel(function: Callable) -> bool:
    """Whether a function of queries, keys and their angles has a kernel."""
    return rotary_kernel(function, (*torch.empty(2, 1, 1, 1, 8), *torch.empty(2, 1, 1, 8))) is not None


def rotary_function(name: str, function: Callable) -> KernelFunction:
    """Such a function by its kernel, for the tensors that have one."""
    return KernelFunction(name, function, rotary_kernel)


def _can_run(tensors: tuple[Tensor, ...]) -> bool:
    if torch_compat.operations_are_seen() or torch.compiler.is_compiling():
        return False
    device = tensors[0].device
    for tensor in tensors:
        is_plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
        if not is_plain or tensor.device != device or not tensor.numel():
            return False
    return True


def norm_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of a norm of `x` `[..., H]` and a weight `[H]`."""
    if len(tensors) != 2 or not _have_kernels(tensors) or tensors[0].shape[-1] > _WIDEST:
        return None
    graph = _graph(function, [torch.empty(2, 3, 8, dtype=tensors[0].dtype), torch.empty(8, dtype=tensors[1].dtype)])
    for eps in () if graph is None or tensors[1].dim() != 1 else _constants(graph):
        for offset, casts_last in ((0.0, False), (0.0, True), (1.0, True)):
            arguments = eps, offset, casts_last

            def formula(x: Tensor, weight: Tensor, arguments: Any = arguments) -> Tensor:
                return layer_functions.rms_norm_formula(x, weight, *arguments)

            if _is_same(graph, formula):
                return lambda x, weight, arguments=arguments: RMSNorm.apply(x, weight, *arguments)
    return None


def gated_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of an activation of one projection `[..., I]` times another."""
    if len(tensors) != 2 or not _have_kernels(tensors) or tensors[0].dtype != tensors[1].dtype:
        return None
    graph = _graph(function, [torch.empty(2, 3, 8, dtype=tensor.dtype) for tensor in tensors])
    for kind in () if graph is None else GATED_KINDS:
        if _is_same(graph, lambda gate, up, kind=kind: layer_functions.gated_formula(gate, up, kind)):
            return lambda gate, up, kind=kind: Gated.apply(gate, up, kind)
        if _is_same(graph, lambda up, gate, kind=kind: layer_functions.gated_formula(gate, up, kind)):
            return lambda up, gate, kind=kind: Gated.apply(gate, up, kind)
    return None


def rotary_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of the rotation of queries and keys `[B, heads, L, D]` by angles `[B or 1, L, D]`."""
    if len(tensors) != 4 or not _have_kernels(tensors):
        return None
    cos, sin = tensors[2:]
    width = cos.shape[-1]
    if {tensor.shape[-1] for tensor in tensors} != {width} or width % 2 or cos.requires_grad or sin.requires_grad:
        return None
    if [tensor.dim() for tensor in tensors] != [4, 4, 3, 3] or cos.dtype != sin.dtype:
        return None
    shapes = [(2, 3, 5, width), (2, 3, 5, width), (2, 5, width), (2, 5, width)]
    examples = [torch.empty(shape, dtype=tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]
    graph = _graph(function, examples)
    return Rotary.apply if graph is not None and _is_same(graph, layer_functions.rotary_formula) else None


def _have_kernels(tensors: tuple[Tensor, ...]) -> bool:
    return all(tensor.dtype in _DTYPES and tensor.numel() < _MOST_ELEMENTS for tensor in tensors)


def _graph(function: Callable, examples: list[Tensor]) -> fx.GraphModule | None:
    """The operations of a function of such tensors; `None` where it is more than these."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return make_fx(lambda *tensors: function(*tensors))(*examples)  # it counts the arguments of what it gets
    except Exception:  # whatever the function does with what stands for a tensor
        return None


def _is_same(graph: Any, formula: Callable) -> bool:
    examples = [node.meta["tensor_meta"] for node in graph.graph.nodes if node.op == "placeholder"]
    made = _graph(formula, [torch.empty(meta.shape, dtype=meta.dtype) for meta in examples])
    return made is not None and _expression(made) == _expression(graph)


def _constants(graph: fx.GraphModule) -> Iterator[float]:
    for node in graph.graph.nodes:
        yield from (argument for argument in node.args if isinstance(argument, float))


def _expression(graph: fx.GraphModule) -> Any:
    """What a graph returns, in terms of what it gets: operations, each with its arguments."""
    written: dict[fx.Node, Any] = {}
    inputs = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            written[node], inputs = f"input {inputs}", inputs + 1
            continue
        arguments = _without_needless_casts(node) if node.target in _COMMUTATIVE else node.args
        args = fx.node.map_arg(arguments, lambda inner: written[inner])
        if node.op == "output":
            return args
        kwargs = {name: value for name, value in node.kwargs.items() if name not in ("device", "layout")}
        target: Any = node.target
        if target in _COMMUTATIVE:
            args = sorted(args, key=repr)
        elif target == torch.ops.aten.pow.Tensor_Scalar and args[1] == -0.5:
            target, args = torch.ops.aten.rsqrt.default, args[:1]
        written[node] = str(target), *args, sorted(kwargs.items())
    raise AssertionError("a graph without output")


def _without_needless_casts(node: fx.Node) -> list[Any]:
    """The arguments of an operation that computes in float32 because one of them is: the others are cast anyway."""
    kept: list[Any] = list(node.args)
    if node.meta["tensor_meta"].dtype != torch.float32 or not all(isinstance(argument, fx.Node) for argument in kept):
        return kept
    for number, argument in enumerate(kept):
        is_float32 = [other.meta["tensor_meta"].dtype == torch.float32 for other in kept]
        if argument.target == torch.ops.aten._to_copy.default and sum(is_float32) == len(kept):
            kept[number] = argument.args[0]
    return kept
