"""
The forward of a module as a function of tensors: its input and its parameters.

The compiler of such a function has nothing to guard but tensors. All layers of a model share what is compiled, whatever
wrappers, hooks and sharded parameters their modules have.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat


# Values of attributes that a compiled function may have as constants
CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_PROJECTIONS = (nn.Linear, Conv1D)
_MATRICES = (*_PROJECTIONS, nn.Embedding)  # FSDP1 leaves a tensor of one dimension behind for weights of any shape


class NotAFunctionError(Exception):
    """The forward of a module is more than a function of its input and its parameters."""


class Blueprint(NamedTuple):
    """
    What the forward of a module reads beside its input. Equal for modules that compute the same with other parameters.

    Args:
        cls (`type`): the class of the module.
        methods (`tuple`): names and methods of the class, without those of `nn.Module`.
        functionals (`tuple`): names and values of the functions in `torch.nn.functional` that its methods may call.
        constants (`tuple`): names and values of the attributes that its methods may read.
        parameters (`tuple[str, ...]`): names of its own parameters.
        children (`tuple`): names and blueprints of the modules in it.
    """

    cls: type
    methods: tuple[tuple[str, Any], ...]
    functionals: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    parameters: tuple[str, ...]
    children: tuple[tuple[str, Any], ...]


class _Partial(NamedTuple):
    """A `functools.partial`, which is equal to none but itself, as a value."""

    function: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


class _Own(NamedTuple):
    """A method of a module that the module holds as an attribute."""

    name: str


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward of a module needs one argument and takes no other that might be a tensor."""
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(arguments) == 1 and arguments[0].kind is arguments[0].POSITIONAL_OR_KEYWORD


def is_norm(module: nn.Module) -> bool:
    """
    Whether a module is a normalisation, or something as simple: no parts, no buffers, at most weights of one dimension.
    """
    if [*module.children(), *module.buffers()] or isinstance(module, _MATRICES):
        return False
    own = parameter_names(module)
    scale_alone = {"eps", "variance_epsilon", "normalized_shape"} & vars(module).keys()
    is_scale = all(_dimensions(getattr(module, name)) == 1 for name in own) if own else bool(scale_alone)
    return is_scale and takes_one_tensor(module)


def is_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP: projections and functions of single elements, from one tensor to one tensor."""
    parts = list(module.modules())[1:]
    if sum(isinstance(part, _PROJECTIONS) for part in parts) < 2 or not takes_one_tensor(module):
        return False
    return all(isinstance(part, _PROJECTIONS) or not _matrices(part) for part in parts)


def _matrices(module: nn.Module) -> list[str]:
    return [name for name in parameter_names(module) if _dimensions(getattr(module, name)) > 1]


def _dimensions(parameter: Any) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves an empty tensor behind


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's own parameters; FSDP1 puts plain tensors in their place."""
    own = [name for name, value in module._parameters.items() if value is not None]
    return (*own, *(name for name, value in vars(module).items() if isinstance(value, Tensor)))


def is_hooked(module: nn.Module) -> bool:
    """
    Whether a module has hooks of its own, or one that every module has runs. Those with which ZeRO-3 would gather the
    weights of a module that has none do not count.
    """
    if any(torch_compat.GLOBAL_HOOKS):
        return True
    own = module.__dict__
    hooks = [hook for name in torch_compat.HOOKS if own[name] for hook in own[name].values()]
    return bool(hooks) and (bool(parameter_names(module)) or not all(map(model_compat.is_hook_of_deepspeed, hooks)))


def read_blueprint(module: nn.Module) -> Blueprint:
    """
    What the forward of a module reads. Hooks of the module itself run around its forward and do not matter here; parts
    of it must have none.

    Raises:
        [`NotAFunctionError`]: with the reason.
    """
    cls = type(module)
    if not model_compat.is_plain_library_function(cls.forward):
        raise NotAFunctionError(f"the forward of {cls.__name__} is not transformers' or torch's")
    if any(buffer is not None for buffer in module._buffers.values()) or isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    ):
        raise NotAFunctionError(f"{cls.__name__} has parts of its own kind")
    if isinstance(module, torch_compat.Dropout) and module.p:
        raise NotAFunctionError("it drops out")
    children = []
    for name, child in module.named_children():
        if is_changed(child):
            raise NotAFunctionError(f"{type(child).__name__} has hooks or another forward")
        children.append((name, read_blueprint(child)))
    constants, parameters = constants_of(module), parameter_names(module)
    return Blueprint(cls, methods_of(cls), functionals_of(cls), constants, parameters, tuple(children))


def is_changed(part: nn.Module) -> bool:
    """Whether more or something else than the forward of its class runs when a part of a module is called."""
    return "forward" in vars(part) or is_hooked(part) or torch_compat.is_compiled(part)


def constants_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Names and values of the attributes that the methods of a module may read, in a form that equal ones share."""
    used, found = _names_used(methods_of(type(module))), {}
    for name, value in vars(module).items():
        if name in used and name != "training" and not isinstance(value, Tensor):
            constant = _constant(module, value)
            if constant is not None:
                found[name] = constant[0]
    found.update((name, None) for name, value in module._parameters.items() if value is None)
    if isinstance(module, torch_compat.Dropout):
        found["training"] = False  # it drops out nothing
    return tuple(sorted(found.items()))


def _constant(module: nn.Module, value: Any) -> tuple[Any] | None:
    """A value of an attribute in a form that equal values share, in a tuple; `None` where it is no constant."""
    if isinstance(value, (*CONSTANTS, *_FUNCTIONS)):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, CONSTANTS) for item in value):
        return (tuple(value),)
    if isinstance(value, functools.partial):
        keywords = tuple(sorted(value.keywords.items()))
        plain = all(isinstance(item, CONSTANTS) for item in (*value.args, *value.keywords.values()))
        return (_Partial(value.func, value.args, keywords),) if plain else None
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return (_Own(value.__func__.__name__),)
    return None


@functools.cache
def _names_used(methods: tuple[tuple[str, Any], ...]) -> frozenset[str]:
    """Names of attributes that the methods of a class may read: those of other layers, such as its number, are left."""
    functions = [getattr(value, "fget", getattr(value, "__func__", value)) for _, value in methods]
    codes, names = [function.__code__ for function in functions], set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return frozenset(names)


def homes_of(cls: type) -> list[type]:
    """A class and those that it inherits from, the first last, but not those of `nn.Module`."""
    return [home for home in reversed(cls.__mro__) if home not in nn.Module.__mro__]


def methods_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """Names and values of the methods that a class has of itself and of those that it inherits from."""
    found = {
        name: value
        for home in homes_of(cls)
        for name, value in vars(home).items()
        if isinstance(value, _METHODS) and not name.startswith("__")
    }
    return tuple(found.items())


def functionals_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """Names and values of the functions in `torch.nn.functional` that the methods of a class may call."""
    found = {name: vars(nn.functional).get(name) for name in sorted(_names_used(methods_of(cls)))}
    return tuple((name, value) for name, value in found.items() if callable(value) and not isinstance(value, type))


@functools.cache
def _stand_in(blueprint: Blueprint) -> type:
    """A class with the methods and constants of a module's, and nothing of what `nn.Module` does around a forward."""
    body: dict[str, Any] = dict(blueprint.methods)
    for name, value in blueprint.constants:
        if isinstance(value, _Partial):
            value = functools.partial(value.function, *value.args, **dict(value.keywords))
        elif isinstance(value, _Own):
            value = body[value.name]
        elif isinstance(value, _FUNCTIONS):
            value = staticmethod(value)
        body[name] = value
    body["__call__"] = lambda self, *args, **kwargs: self.forward(*args, **kwargs)
    return type(blueprint.cls.__name__, (), body)


def as_function(blueprint: Blueprint) -> Callable[..., Tensor]:
    """
    The forward of the modules of a blueprint as a function of the input `[..., H]` and the tensors of
    [`parameter_places`]. It returns a tensor of the same shape, or fails.
    """
    parts = tuple(_parts(blueprint))

    def forward(hidden: Tensor, *parameters: Tensor) -> Tensor:
        made: list[Any] = []
        used = 0
        for cls, parent, name, names in parts:
            part = cls()
            for parameter in names:
                setattr(part, parameter, parameters[used])
                used += 1
            if parent >= 0:
                setattr(made[parent], name, part)
            made.append(part)
        result = made[0].forward(hidden)
        assert result.shape == hidden.shape
        return result

    return forward


def _parts(blueprint: Blueprint) -> Iterator[tuple[type, int, str, tuple[str, ...]]]:
    """Each part's class, the number of the part that it belongs to, its name there, and its parameters."""
    waiting, number = [(blueprint, -1, "")], 0
    while waiting:
        current, parent, name = waiting.pop(0)
        yield _stand_in(current), parent, name, current.parameters
        waiting += [(child, number, child_name) for child_name, child in current.children]
        number += 1


def parameter_places(module: nn.Module, blueprint: Blueprint) -> list[tuple[nn.Module, str]]:
    """Where the parameters of a module are, in the order in which its function takes them."""
    places, waiting = [], [(blueprint, module)]
    while waiting:
        current, owner = waiting.pop(0)
        places += [(owner, name) for name in current.parameters]
        waiting += [(child, getattr(owner, name)) for name, child in current.children]
    return places
