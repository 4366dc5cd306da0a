"""Stand-ins by kernels of `layer_kernels`: for the forward of a module, and for a function of a modeling file."""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from trl_fused_grpo._compat import models as model_compat

from .as_read import GlobalsAsRead, StandIn
from .attention_places import InFile
from .forward_override import is_override
from .layer_kernels import KernelFunction, gated_function, has_rotary_kernel, norm_function, rotary_function
from .layer_memo import layers_of
from .mlp_activations import MLPParts, read_mlp
from .module_functions import (
    Blueprint,
    NotAFunctionError,
    as_function,
    is_mlp,
    is_norm,
    parameter_places,
    read_blueprint,
)
from .shared_casts import ProjectionForward, projections_in


class CompiledForward(StandIn):
    """
    The forward of one module, by what was compiled for all of its blueprint.

    Args:
        module (`nn.Module`): a norm or an MLP.
        blueprint ([`Blueprint`]): what its forward reads.
        function ([`KernelFunction`]): of its input and its parameters.
    """

    def __init__(self, module: nn.Module, blueprint: Blueprint, function: KernelFunction):
        super().__init__(module)
        self.function = function
        self._places = parameter_places(module, blueprint)
        self._original: Callable = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(self._original, self.module, *args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return original()
        tensors = (args[0], *[getattr(owner, name) for owner, name in self._places])
        return self.function(tensors, original)


@functools.cache
def _norm_function(blueprint: Blueprint) -> KernelFunction | None:
    return norm_function(blueprint.cls.__name__, as_function(blueprint))


class CompiledActivation(StandIn):
    """
    The forward of an MLP whose projections run as they are, with what is between them compiled.

    Args:
        module (`nn.Module`): the MLP.
        parts ([`MLPParts`]): what its forward is made of.
        function ([`KernelFunction`]): of what its first projections return.
    """

    def __init__(self, module: nn.Module, parts: MLPParts, function: KernelFunction):
        super().__init__(module, parts.functions)
        self.parts, self.function = parts, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, parts = self.module, self.parts
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return type(module).forward(module, *args, **kwargs)
        (hidden,) = args
        projected = tuple([getattr(module, name)(hidden) for name in parts.firsts])
        return getattr(module, parts.last)(self.function(projected, lambda: self.function.function(*projected)))


# Of each kind of MLP
_activations: dict[Any, KernelFunction | None] = {}


def _by_parts(module: nn.Module, parts: MLPParts) -> CompiledActivation | None:
    """The forward of an MLP whose projections run as they are."""
    if parts.key not in _activations:
        _activations[parts.key] = gated_function(f"{type(module).__name__}_activation", parts.activation)
    function = _activations[parts.key]
    return None if function is None else CompiledActivation(module, parts, function)


class CompiledInFile:
    """
    A function of a modeling file, such as the rotary embedding of its attention, compiled for each kind of arguments.

    Args:
        place ([`InFile`]): where the layers look it up.
    """

    def __init__(self, place: InFile):
        self.place, self.original = place, place.read()
        self._read = GlobalsAsRead(self.original)
        self.name = f"{place.file.__name__.rpartition('.')[2]}_{place.name}"
        self._compiled: dict[Any, KernelFunction] = {}

    def change(self) -> str | None:
        """What stands in its place, or what the original calls, in words; `None` while those are as they were."""
        if self.place.read() not in (self, self.original) or not self._read.holds():
            return f"`{self.place.name}`, or a function that it calls, was replaced in {self.place.file.__name__}"
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(self.original, *args, **kwargs)
        values = (*args, *kwargs.values())
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        # Lists have no hash; what else has none is left to the original
        constants = tuple(None if isinstance(value, Tensor) else (_hashable(value),) for value in values)
        key = (len(args), tuple(kwargs), constants)
        try:
            known = key in self._compiled
        except TypeError:
            return original()
        if not known:
            self._compiled[key] = rotary_function(self.name, self._of_tensors(args, kwargs))
        return self._compiled[key](tensors, original) if tensors else original()

    def _of_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable:
        """The function of the tensors among its arguments; the others are constants."""
        function, count, names = self.original, len(args), tuple(kwargs)
        constants = tuple(None if isinstance(value, Tensor) else value for value in (*args, *kwargs.values()))
        are_tensors = tuple(isinstance(value, Tensor) for value in (*args, *kwargs.values()))

        def of_tensors(*tensors: Tensor) -> Any:
            values: list[Any] = []
            used = 0
            for is_tensor, constant in zip(are_tensors, constants, strict=True):
                values.append(tensors[used] if is_tensor else constant)
                used += is_tensor
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return of_tensors


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def compiled_in_file(place: InFile) -> CompiledInFile | None:
    """What may stand in the place of a function."""
    return CompiledInFile(place) if has_rotary_kernel(place.read()) else None


Forward: TypeAlias = CompiledForward | CompiledActivation | ProjectionForward


class FoundParts(NamedTuple):
    """
    The parts of a text model that may run in kernels.

    Args:
        forwards (`dict`): of norms, MLPs and projections.
        functions (`list`): for rotary embeddings.
    """

    forwards: dict[nn.Module, Forward]
    functions: list[CompiledInFile]


def find_parts(text_model: nn.Module) -> FoundParts:
    """The norms, MLPs, projections and rotary embeddings of a text model."""
    callers = {part: module for module in text_model.modules() for part in module.children()}
    found = FoundParts({}, [])
    for module in _candidates(text_model):
        # A kernel keeps the norm's input for backward, and who calls it may change that in place
        may_have_kernel = not is_norm(module) or _is_of_the_library(callers[module])
        forward = _forward_of(module) if may_have_kernel else None
        if forward is not None:
            found.forwards[module] = forward
    # Last: a forward that has a whole MLP in it asks whether its projections are as they were
    for layer in layers_of(text_model):
        found.forwards.update({forward.module: forward for forward in projections_in(layer)})
    for place in _rotary_places(text_model):
        function = compiled_in_file(place) if model_compat.is_plain_library_function(place.read()) else None
        if function is not None:
            found.functions.append(function)
    return found


def _is_of_the_library(caller: nn.Module) -> bool:
    own = vars(caller).get("forward")
    forward = inspect.unwrap(type(caller).forward)  # transformers wraps that of every layer
    return (own is None or is_override(own)) and model_compat.is_plain_library_function(forward)


def _forward_of(module: nn.Module) -> Forward | None:
    """The forward in a kernel that a module may have: of its whole, or of an MLP's activation."""
    with suppress(NotAFunctionError):
        blueprint = read_blueprint(module)
        norm = _norm_function(blueprint)
        if norm is not None:
            return CompiledForward(module, blueprint, norm)
    parts = _parts_of_mlp(module)
    return None if parts is None else _by_parts(module, parts)


def _parts_of_mlp(module: nn.Module) -> MLPParts | None:
    # To be read, a forward is run with something that stands for a tensor. The user's would see that
    return read_mlp(module) if model_compat.is_plain_library_function(type(module).forward) else None


def _candidates(text_model: nn.Module) -> list[nn.Module]:
    """The norms and MLPs of a text model. Experts are none: how many tokens each gets is known when it runs."""
    found = [module for module in text_model.children() if is_norm(module)]
    for layer in layers_of(text_model):
        found += _candidates_in(layer)
    return found


def _candidates_in(module: nn.Module) -> list[nn.Module]:
    """The norms and MLPs among the parts of a module, the outermost ones."""
    found = []
    for part in module.children():
        if isinstance(part, nn.ModuleList):
            continue
        is_candidate = is_norm(part) or is_mlp(part) or _parts_of_mlp(part) is not None
        found += [part] if is_candidate else _candidates_in(part)
    return found


def _rotary_places(text_model: nn.Module) -> list[InFile]:
    """Where the forwards of a text model's modules look up functions for rotary embeddings: in their files."""
    places = set()
    for cls in {type(module) for module in text_model.modules()}:
        forward: Any = inspect.unwrap(cls.forward)
        code, file = getattr(forward, "__code__", None), inspect.getmodule(forward)
        if code is None or file is None:
            continue
        for name in code.co_names:
            if "rotary" in name and callable(getattr(file, name, None)):
                places.add(InFile(file, name))
    return sorted(places, key=lambda place: place.name)
