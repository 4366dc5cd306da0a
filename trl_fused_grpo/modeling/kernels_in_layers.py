"""
Norms, gated activations and rotary embeddings of a text model, by a kernel for the time of a forward where they have
one (`layer_kernels`).

While a model runs, and while its checkpointed layers are computed again in backward, the kernel of each stands in its
place. At any other time the model is what it was. What somebody has hooked or replaced is not looked for here: such
models run at a level that leaves their layers as they are.
"""

import functools
import inspect
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._utils import temporary_value
from trl_fused_grpo.ops.kernels import why_not_triton

from .attention_places import InFile
from .layer_kernels import KernelFunction, gated_function, has_rotary_kernel, norm_function, rotary_function
from .layer_memo import LayerMemo, layers_of


_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, tuple)
_MATRICES = (nn.Linear, Conv1D, nn.Embedding)  # FSDP1 leaves a tensor of one dimension behind for weights of any shape
_FUNCTIONS = {
    *(operator.mul, operator.add, operator.getitem, torch.mul, torch.add, torch.chunk),
    *(nn.functional.silu, nn.functional.gelu, nn.functional.relu),
}
_METHODS = {"chunk"}


class StandIn:
    """What stands in the place of the forward of a module, while its constants are those that were read."""

    def __init__(self, module: nn.Module, read: Iterable[nn.Module]):
        self.module = module
        self._read = [(part, _constants_of(part)) for part in read]

    def fits(self) -> bool:
        """Return `True` if the module is what was read, and has no other forward of its own."""
        is_free = all("forward" not in vars(owner) for owner in (self.module, *(part for part, _ in self._read)))
        return is_free and all(_constants_of(part) == constants for part, constants in self._read)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # a copy made meanwhile has nothing of its own yet: that of its class


class NormInKernel(StandIn):
    """The forward of a norm with one weight."""

    def __init__(self, module: nn.Module, weight: str, function: KernelFunction):
        super().__init__(module, [module])
        self.weight, self.function = weight, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(type(self.module).forward, self.module, *args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return original()
        return self.function((args[0], getattr(self.module, self.weight)), original)


class _MLPParts(NamedTuple):
    """An MLP whose forward is `last(activation(*(first(x) for first in firsts)))`."""

    firsts: tuple[str, ...]
    last: str
    functions: tuple[str, ...]  # names of the modules without parameters in between
    activation: Callable[..., Tensor]
    key: Any  # equal for MLPs with the same activation


class MLPWithKernel(StandIn):
    """The forward of an MLP whose projections run as they are, with a kernel for what is between them."""

    def __init__(self, module: nn.Module, parts: _MLPParts, function: KernelFunction):
        super().__init__(module, [module, *(module.get_submodule(name) for name in parts.functions)])
        self.parts, self.function = parts, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, parts = self.module, self.parts
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return type(module).forward(module, *args, **kwargs)
        (hidden,) = args
        projected = tuple([getattr(module, name)(hidden) for name in parts.firsts])
        return getattr(module, parts.last)(self.function(projected, lambda: self.function.function(*projected)))


class RotaryInKernel:
    """The rotary embedding of a modeling file, for queries, keys and the cosines and sines of their angles."""

    def __init__(self, place: InFile):
        self.place, self.original = place, place.read()
        self._kernel = rotary_function(f"{place.file.__name__}.{place.name}", self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(self.original, *args, **kwargs)
        is_plain = len(args) == 4 and not kwargs and all(isinstance(value, Tensor) for value in args)
        return self._kernel(args, original) if is_plain else original()


_is_on: ContextVar[bool] = ContextVar("_is_on", default=False)


@contextmanager
def kernels_on(is_on: bool = True) -> Generator[None, None, None]:
    """While it lasts, [`kernels_in_place`] has an effect."""
    with temporary_value(_is_on, is_on):
        yield


@contextmanager
def kernels_in_place(causal_lm: PreTrainedModel) -> Generator[None, None, None]:
    """
    While it lasts, the norms, MLPs and rotary embeddings of a model's text model run in kernels, where these are on. So
    they do when its checkpointed layers are computed again in backward.
    """
    # A mode may have ended when the layers are computed again
    parts = parts_with_kernels(causal_lm) if _is_on.get() and not torch_compat.operations_are_seen() else None
    if parts is None or not (parts.forwards or parts.functions):
        yield
        return
    functions = [(layer, model_compat.checkpoint_function(layer), inside) for layer, inside in parts.checkpointed]
    functions = [entry for entry in functions if entry[1] is not None]
    with _in_place(parts.forwards, parts.functions) as forwards:
        try:
            for layer, function, inside in functions:
                again = [forward for forward in inside if forward in forwards], parts.functions
                model_compat.set_checkpoint_function(layer, _InKernelsAgain(function, *again))
            yield
        finally:
            for layer, function, _ in functions:
                model_compat.set_checkpoint_function(layer, function)


def why_no_kernels(model: nn.Module, device: torch.device) -> str | None:
    """
    Return why no norm, MLP or rotary embedding of a model runs in a kernel, or `None`.

    Args:
        model (`nn.Module`): in no wrapper but PEFT's and the compiler's.
        device (`torch.device`): where it is.
    """
    reason = why_not_triton(device)
    if reason is not None:
        return reason
    return parts_with_kernels(model_compat.without_adapter(torch_compat.without_compiler(model))).refusal


class PartsWithKernels(NamedTuple):
    """
    What runs in kernels of a model.

    Args:
        forwards (`list`): the forwards of norms and MLPs.
        functions (`list`): rotary embeddings in its modeling files.
        checkpointed (`list`): the modules of the text model that can checkpoint, each with the forwards in it.
        refusal (`str`, *optional*): why nothing does.
    """

    forwards: list[StandIn]
    functions: list[RotaryInKernel]
    checkpointed: list[tuple[nn.Module, list[StandIn]]]
    refusal: str | None


@LayerMemo
def parts_with_kernels(causal_lm: PreTrainedModel) -> PartsWithKernels:
    """Find the norms, MLPs and rotary embeddings of a model's text model that have a kernel."""
    refusal = _why_layers_are_left(causal_lm)
    if refusal is not None:
        return PartsWithKernels([], [], [], refusal)
    text_model = architecture.text_model(causal_lm)
    candidates = [*filter(is_norm, text_model.children()), *_parts_in(layers_of(text_model))]
    found = {part: forward for part in candidates if (forward := _stand_in(part)) is not None}
    functions = [*filter(None, map(_rotary_in_kernel, _rotary_places(text_model)))]
    checkpointed = [module for module in text_model.modules() if hasattr(module, "gradient_checkpointing")]
    inside = [(layer, [found[part] for part in layer.modules() if part in found]) for layer in checkpointed]
    refusal = None if found or functions else "its norms, MLPs and rotary embeddings are not known"
    return PartsWithKernels([*found.values()], functions, inside, refusal)


def _why_layers_are_left(causal_lm: PreTrainedModel) -> str | None:
    for module in causal_lm.modules():
        if torch_compat.is_compiled(module):
            return "a part of the model is compiled already"
        if torch_compat.is_checkpoint_wrapper(module):
            return "a wrapper of torch's computes its layers again in backward, as they are"
    return None


def _parts_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of layers that may be norms or MLPs. How many tokens an expert gets is known when it runs."""
    parts = [part for module in modules for part in module.children() if not isinstance(part, nn.ModuleList)]
    return parts + _parts_in(parts) if parts else []


def _stand_in(module: nn.Module) -> StandIn | None:
    """The forward with a kernel that a norm or an MLP may have."""
    if not (model_compat.is_plain_library_function(type(module).forward) and takes_one_tensor(module)):
        return None
    if is_norm(module):
        names = _parameter_names(module)
        if len(names) != 1:
            return None
        constants = type(module), names, _constants_of(module)
        if constants not in _norms:
            _norms[constants] = norm_function(type(module).__name__, _with_weight(module, *names))
        norm = _norms[constants]
        return None if norm is None else NormInKernel(module, *names, norm)
    parts = read_mlp(module)
    if parts is None:
        return None
    if parts.key not in _activations:
        _activations[parts.key] = gated_function(f"{type(module).__name__}_activation", parts.activation)
    activation = _activations[parts.key]
    return None if activation is None else MLPWithKernel(module, parts, activation)


# Of each kind of norm and MLP
_norms: dict[Any, KernelFunction | None] = {}
_activations: dict[Any, KernelFunction | None] = {}


def is_norm(module: nn.Module) -> bool:
    """Return `True` for a normalisation, or as simple a thing: no parts, no buffers, weights of one dimension."""
    if [*module.children(), *module.buffers()] or isinstance(module, _MATRICES):
        return False
    weights = [getattr(module, name) for name in _parameter_names(module)]
    # ZeRO-3 leaves an empty tensor behind
    return bool(weights) and all(len(getattr(weight, "ds_shape", weight.shape)) == 1 for weight in weights)


def takes_one_tensor(module: nn.Module) -> bool:
    """Return `True` if a forward needs one argument and takes no other that might be a tensor."""
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(arguments) == 1 and arguments[0].kind is arguments[0].POSITIONAL_OR_KEYWORD


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's own parameters; FSDP1 puts plain tensors in their place."""
    own = [name for name, value in module._parameters.items() if value is not None]
    return (*own, *(name for name, value in vars(module).items() if isinstance(value, Tensor)))


def _constants_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Names and values of the attributes that the methods of a module may read."""
    own = vars(module)
    return tuple([(name, own[name]) for name in _names_used(type(module)) if type(own.get(name, own)) in _CONSTANTS])


@functools.cache
def _names_used(cls: type) -> tuple[str, ...]:
    functions = [value for home in cls.__mro__ if home not in nn.Module.__mro__ for value in vars(home).values()]
    names = {name for value in functions if isinstance(value, FunctionType) for name in value.__code__.co_names}
    return tuple(sorted(names - {"training"}))


def _with_weight(module: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The forward of a norm as a function of its input `[..., H]` and its weight."""

    bare = _bare(module)

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        vars(bare)[name] = weight
        try:
            return type(bare).forward(bare, hidden)
        finally:
            del vars(bare)[name]

    return forward


def _of_tensor(module: nn.Module) -> Callable[[Tensor], Tensor]:
    bare = _bare(module)
    return lambda x: type(bare).forward(bare, x)


def _bare(module: nn.Module) -> nn.Module:
    """A module with the class and the attributes of another, without its weights and hooks."""
    bare = object.__new__(type(module))
    nn.Module.__init__(bare)
    own = {name: value for name, value in vars(module).items() if not isinstance(value, Tensor)}
    vars(bare).update({name: value for name, value in own.items() if name not in vars(bare)})
    return bare


class _OfChildren(fx.Tracer):
    """Traces the forward of a module, but not that of its children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def read_mlp(mlp: nn.Module) -> _MLPParts | None:
    """
    Return how the forward of a module is made of projections and an activation; `None` where it is not. Its children
    may be wrapped and hooked as they like; they are not run.
    """
    children = dict(mlp.named_children())
    projections = [name for name, child in children.items() if any(True for _ in child.parameters())]
    if len(projections) < 2:
        return None
    functions = {name: child for name, child in children.items() if name not in projections}
    if not all(map(_is_function, functions.values())):
        return None
    try:
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
    projected = tuple(str(node.target) for node in firsts)
    of_functions = tuple((name, type(child), _constants_of(child)) for name, child in sorted(functions.items()))
    key = type(mlp), _constants_of(mlp), projected, last.target, of_functions
    return _MLPParts(projected, str(last.target), tuple(functions), _function_of(firsts, inner, functions), key)


def _is_function(module: nn.Module) -> bool:
    """Return `True` for an activation: one tensor in and out, without parts, buffers or dropout."""
    is_plain = model_compat.is_plain_library_function(type(module).forward) and "forward" not in vars(module)
    is_simple = not [*module.children(), *module.buffers()] and not isinstance(module, torch_compat.Dropout)
    return is_plain and is_simple and takes_one_tensor(module)


def _is_known(node: fx.Node, functions: dict[str, Any]) -> bool:
    if node.op == "call_module":
        return node.target in functions and not node.kwargs
    return node.target in {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, ())


def _function_of(inputs: list[fx.Node], nodes: list[fx.Node], functions: dict[str, nn.Module]) -> Callable[..., Tensor]:
    """What some nodes compute from others, with the forward of its class in the place of each module."""
    graph = fx.Graph()
    copies: dict[Any, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node.op == "call_module":
            function = _of_tensor(functions[str(node.target)])
            copies[node] = graph.call_function(function, tuple(copies[arg] for arg in node.args))
        else:
            copies[node] = graph.node_copy(node, lambda node: copies[node])
    graph.output(copies[nodes[-1]])
    return fx.GraphModule({}, graph)


def _rotary_places(text_model: nn.Module) -> list[InFile]:
    """Where the forwards of a text model's modules look up functions for rotary embeddings: in their files."""
    places = set()
    for cls in {type(module) for module in text_model.modules()}:
        forward: Any = inspect.unwrap(cls.forward)
        code, file = getattr(forward, "__code__", None), inspect.getmodule(forward)
        if code is not None and file is not None:
            names = [name for name in code.co_names if "rotary" in name and callable(getattr(file, name, None))]
            places.update(InFile(file, name) for name in names)
    return sorted(places, key=lambda place: place.name)


_rotaries: dict[InFile, RotaryInKernel] = {}


def _rotary_in_kernel(place: InFile) -> RotaryInKernel | None:
    function = place.read()
    if place not in _rotaries and model_compat.is_plain_library_function(function) and has_rotary_kernel(function):
        _rotaries[place] = RotaryInKernel(place)
    return _rotaries.get(place)


# Which running forwards need a function in its file: layers on several devices are computed again in several threads
_users: defaultdict[InFile, set[object]] = defaultdict(set)
_lock = threading.Lock()


@contextmanager
def _in_place(forwards: Iterable[StandIn], functions: list[RotaryInKernel]) -> Generator[set[StandIn], None, None]:
    """While it lasts, these forwards and functions stand where the model finds them, as far as they fit."""
    placed, user = set[StandIn](), object()
    try:
        for forward in forwards:
            if forward.fits():
                placed.add(forward)
                forward.module.__dict__["forward"] = forward
        for function in functions:
            with _lock:
                if function.place.read() in (function, function.original):
                    _users[function.place].add(user)
                    function.place.write(function)
        yield placed
    finally:
        for function in functions:
            with _lock:
                _users[function.place].discard(user)
                if not _users[function.place] and function.place.read() is function:
                    function.place.write(function.original)
        for forward in placed:
            if vars(forward.module).get("forward") is forward:
                del forward.module.__dict__["forward"]


class _InKernelsAgain:
    """The function with which a layer checkpoints, so that the layer is computed again as it runs now."""

    def __init__(self, checkpoint: Callable, forwards: list[StandIn], functions: list[RotaryInKernel]):
        self.checkpoint, self.forwards, self.functions = checkpoint, forwards, functions

    def __call__(self, function: Callable, *inputs: Any) -> Any:
        def in_kernels(*args: Any, **kwargs: Any) -> Any:
            with _in_place(self.forwards, self.functions):
                return function(*args, **kwargs)

        return self.checkpoint(in_kernels, *inputs)

    def __reduce__(self) -> Any:
        return _itself, (self.checkpoint,)  # a copy of the layer is that of any other time


def _itself(checkpoint: Callable) -> Callable:
    return checkpoint
