"""
What an MLP computes between its projections: `act(gate) * up`. Where the projections cannot be compiled with it (an
adapter, a quantised weight, hooks that gather weights), this alone is.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .module_functions import as_function, constants_of, read_blueprint, takes_one_tensor


_FUNCTIONS = {
    *(operator.mul, operator.add, operator.getitem, torch.mul, torch.add, torch.chunk),
    *(nn.functional.silu, nn.functional.gelu, nn.functional.relu),
}
_METHODS = {"chunk"}


class MLPParts(NamedTuple):
    """
    An MLP whose forward is `last(activation(*(first(x) for first in firsts)))`.

    Args:
        firsts (`tuple[str, ...]`): names of the projections of the input, in the order in which they run.
        last (`str`): the name of the projection that the result comes from.
        functions (`tuple[str, ...]`): names of the modules without parameters in between.
        activation (`Callable`): what is computed from the output of each of `firsts`.
        key: equal for MLPs with the same activation.
    """

    firsts: tuple[str, ...]
    last: str
    functions: tuple[str, ...]
    activation: Callable[..., Tensor]
    key: Any


class _OfChildren(fx.Tracer):
    """Traces the forward of a module, but not that of its children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def read_mlp(mlp: nn.Module) -> MLPParts | None:
    """
    How the forward of a module is made of projections and an activation; `None` where it is not. Its children may be
    wrapped and hooked as they like; they are not run.
    """
    children = dict(mlp.named_children())
    projections = [name for name, child in children.items() if any(True for _ in child.parameters())]
    if len(projections) < 2 or not takes_one_tensor(mlp):
        return None
    try:
        functions = {name: read_blueprint(child) for name, child in children.items() if name not in projections}
        nodes = list(_OfChildren().trace(mlp).nodes)
    except Exception:  # whatever a forward does with what stands for a tensor
        return None
    source, *between, last, output = nodes
    firsts = [node for node in between if node.op == "call_module" and node.target in projections]
    inner = [node for node in between if node not in firsts]
    is_mlp = (
        last.op == "call_module"
        and sorted([*(node.target for node in firsts), last.target]) == sorted(projections)
        and output.args == (last,)
        and all(node.args == (source,) and not node.kwargs for node in firsts)
        and len(last.args) == 1
        and all(_is_known(node, functions) and source not in node.all_input_nodes for node in inner)
    )
    if not is_mlp or not inner or last.args != (inner[-1],):
        return None
    projected = tuple(node.target for node in firsts)
    key = type(mlp).forward, constants_of(mlp), projected, last.target, tuple(sorted(functions.items()))
    activation = _function_of(firsts, inner, {name: as_function(functions[name]) for name in functions})
    return MLPParts(tuple(str(node.target) for node in firsts), str(last.target), tuple(functions), activation, key)


def _is_known(node: fx.Node, functions: dict[str, Any]) -> bool:
    if node.op == "call_module":
        return node.target in functions and not node.kwargs
    return node.target in {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, ())


def _function_of(inputs: list[fx.Node], nodes: list[fx.Node], functions: dict[str, Callable]) -> Callable:
    """What some nodes compute from others, with a function in the place of each module."""
    graph = fx.Graph()
    copies: dict[Any, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node.op == "call_module":
            copies[node] = graph.call_function(functions[str(node.target)], tuple(copies[arg] for arg in node.args))
        else:
            copies[node] = graph.node_copy(node, lambda node: copies[node])
    graph.output(copies[nodes[-1]])
    return fx.GraphModule({}, graph)
