"""
Which functions of a model's layers have a kernel. A function is known by the operations that it is made of: those of a
formula in `layer_functions`, whatever class it belongs to and however it is written.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.ops import layer_functions
from trl_fused_grpo.ops.layer_functions import GATED_KINDS, Gated, RMSNorm, Rotary


Kernel = Callable[..., Any]
# What is computed is the same whichever comes first
_COMMUTATIVE = {torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 32768  # of a norm: a row is held by one program
MOST_ELEMENTS = 2**31  # of a tensor


class KernelFunction:
    """
    A function of tensors that runs in a kernel, where it is one of those that have any.

    Args:
        name (`str`): what it is.
        function (`Callable`): takes tensors.
        find (`Callable`): the kernel of a function that is called with such tensors, or `None`.
        fits (`Callable`): whether such a kernel may run with these tensors.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        find: Callable[..., Kernel | None],
        fits: Callable[[tuple[Tensor, ...]], bool],
    ):
        self.name, self.function, self._find, self._fits = name, function, find, fits
        self._found: dict[Any, Kernel | None] = {}

    def __call__(self, tensors: tuple[Tensor, ...], original: Callable[[], Any]) -> Any:
        """The function of these tensors by its kernel, or what `original` returns."""
        if not _are_plain(tensors) or not self._fits(tensors):
            return original()
        key = tuple([(tensor.dtype, tensor.shape[-1]) for tensor in tensors])
        if key not in self._found:
            if torch_compat.operations_are_seen():  # it would see those with which the function is looked at
                return original()
            self._found[key] = self._find(self.function, tensors)
        kernel = self._found[key]
        return original() if kernel is None else kernel(*tensors)


def norm_function(name: str, function: Callable) -> KernelFunction | None:
    """A norm by its kernel, `None` where it has none."""
    has_kernel = norm_kernel(function, (torch.empty(1, 1, 8, dtype=torch.bfloat16), torch.empty(8))) is not None
    return KernelFunction(name, function, norm_kernel, _is_norm_of_rows) if has_kernel else None


def gated_function(name: str, function: Callable) -> KernelFunction | None:
    """What is between the projections of an MLP by its kernel, `None` where it has none."""
    has_kernel = gated_kernel(function, tuple(torch.empty(2, 1, 1, 8, dtype=torch.bfloat16))) is not None
    return KernelFunction(name, function, gated_kernel, _are_gate_and_up) if has_kernel else None


def has_rotary_kernel(function: Callable) -> bool:
    """Return `True` if a function of queries, keys and their angles has a kernel."""
    return rotary_kernel(function, (*torch.empty(2, 1, 1, 1, 8), *torch.empty(2, 1, 1, 8))) is not None


def rotary_function(name: str, function: Callable) -> KernelFunction:
    """Such a function by its kernel, for the tensors that have one."""
    return KernelFunction(name, function, rotary_kernel, _are_turned_by_angles)


def _are_plain(tensors: tuple[Tensor, ...]) -> bool:
    if torch.compiler.is_compiling():
        return False
    device = tensors[0].device
    for tensor in tensors:
        is_plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
        if not is_plain or tensor.dtype not in _DTYPES or tensor.device != device or not tensor.dim():
            return False
        if not 0 < tensor.numel() < MOST_ELEMENTS:
            return False
    return True


def _is_norm_of_rows(tensors: tuple[Tensor, ...]) -> bool:
    return len(tensors) == 2 and tensors[1].shape == tensors[0].shape[-1:] and tensors[1].shape[0] <= _WIDEST


def _are_gate_and_up(tensors: tuple[Tensor, ...]) -> bool:
    return len(tensors) == 2 and tensors[0].shape == tensors[1].shape


def _are_turned_by_angles(tensors: tuple[Tensor, ...]) -> bool:
    if [tensor.dim() for tensor in tensors] != [4, 4, 3, 3]:
        return False
    q, k, cos, sin = tensors
    return (
        (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
        and q.shape[2:] == cos.shape[1:]
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and not (cos.requires_grad or sin.requires_grad)
    )


def norm_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of a norm of `x` `[..., H]` and a weight `[H]`."""
    if len(tensors) != 2:
        return None
    examples = _examples((2, 3, 8), (8,), of=tensors)
    graph = _graph(function, examples)
    if graph is None:
        return None
    for eps in _constants(graph):
        for offset, casts_last in ((0.0, False), (0.0, True), (1.0, True)):
            arguments = eps, offset, casts_last

            def formula(x: Tensor, weight: Tensor, arguments: Any = arguments) -> Tensor:
                return layer_functions.rms_norm_formula(x, weight, *arguments)

            if _is_same(function, graph, formula, examples):
                return lambda x, weight, arguments=arguments: RMSNorm.apply(x, weight, *arguments)
    return None


def gated_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of an activation of one projection `[..., I]` times another."""
    if len(tensors) != 2 or tensors[0].dtype != tensors[1].dtype:
        return None
    examples = _examples((2, 3, 8), (2, 3, 8), of=tensors)
    graph = _graph(function, examples)
    if graph is None:
        return None
    for kind in GATED_KINDS:

        def formula(gate: Tensor, up: Tensor, kind: str = kind) -> Tensor:
            return layer_functions.gated_formula(gate, up, kind)

        if _is_same(function, graph, formula, examples):
            return lambda gate, up, kind=kind: Gated.apply(gate, up, kind)
        if _is_same(function, graph, lambda up, gate: formula(gate, up), examples):
            return lambda up, gate, kind=kind: Gated.apply(gate, up, kind)
    return None


def rotary_kernel(function: Callable, tensors: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of the rotation of queries and keys `[B, heads, L, D]` by angles `[B or 1, L, D]`."""
    if len(tensors) != 4 or tensors[0].shape[-1] % 2 or tensors[2].dtype != tensors[3].dtype:
        return None
    width = tensors[0].shape[-1]
    examples = _examples((2, 3, 5, width), (2, 3, 5, width), (2, 5, width), (2, 5, width), of=tensors)
    for angle in examples[2:]:
        angle.requires_grad_(False)
    graph = _graph(function, examples)
    is_rotary = graph is not None and _is_same(function, graph, layer_functions.rotary_formula, examples)
    return Rotary.apply if is_rotary else None


def _examples(*shapes: tuple[int, ...], of: tuple[Tensor, ...]) -> list[Tensor]:
    """Small tensors of the dtypes of others, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [one.to(tensor.dtype).requires_grad_() for one, tensor in zip(found, of, strict=True)]


def _graph(function: Callable, examples: list[Tensor]) -> fx.GraphModule | None:
    """The operations of a function of such tensors; `None` where it is more than these."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            graph = make_fx(lambda *tensors: function(*tensors))(*examples)  # it counts the arguments of what it gets
    except Exception:  # whatever the function does with what stands for a tensor
        return None
    operations = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return None if any(operation._schema.is_mutable for operation in operations) else graph


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_same(function: Callable, graph: fx.GraphModule, formula: Callable, examples: list[Tensor]) -> bool:
    """Return `True` if a function computes a formula, by the same operations and with the same gradients."""
    made = _graph(formula, examples)
    if made is None or _expression(made) != _expression(graph):
        return False
    found, expected = (_results_and_gradients(one, examples) for one in (function, formula))
    if found is None or expected is None or len(found) != len(expected):
        return False
    rtol = 1e-4 if all(tensor.dtype == torch.float32 for tensor in examples) else 3e-2
    return all(torch.allclose(one, other, rtol, rtol) for one, other in zip(found, expected, strict=True))


def _results_and_gradients(function: Callable, examples: list[Tensor]) -> list[Tensor] | None:
    """What a function returns, and its gradients: an autograd function may have others than its operations."""
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            saved_tensors_hooks(_itself, _itself),  # a checkpointed layer that runs meanwhile counts what is saved
        ):
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in examples]
            results = function(*leaves)
            results = list(results) if isinstance(results, tuple) else [results]
            loss = torch.stack([(result.float() * result.float().cos().detach()).sum() for result in results]).sum()
            gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])
    except Exception:  # whatever the function does
        return None
    return [tensor.detach().float() for tensor in (*results, *gradients)]


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
