"""
Norms, MLPs and rotary embeddings of a text model, by a kernel for the time of a forward where they have one
(`layer_kernels`).

They are found by what they are (`module_functions`). While a model runs, and while its checkpointed layers are computed
again in backward, each has a forward that calls the kernel of all of its kind (`compiled_parts`). At any other time the
model is what it was.
"""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat.libraries import is_library_function
from trl_fused_grpo._utils import temporary_value
from trl_fused_grpo.ops.kernels import why_not_triton

from .as_read import StandIn
from .attention_places import InFile
from .compiled_parts import CompiledInFile, Forward, find_parts
from .layer_memo import LayerMemo
from .shared_casts import ProjectionForward


logger = logging.get_logger(__name__)


_is_on: ContextVar[bool] = ContextVar("_is_on", default=False)


@contextmanager
def kernels_on(is_on: bool = True) -> Generator[None, None, None]:
    """While it lasts, [`compiled_forwards`] has an effect."""
    with temporary_value(_is_on, is_on):
        yield


@contextmanager
def compiled_forwards(causal_lm: PreTrainedModel) -> Generator[None, None, None]:
    """
    While it lasts, the norms, MLPs and rotary embeddings of a model's text model run in kernels, where these are on. So
    they do when its checkpointed layers are computed again in backward. What runs as it is because the user has
    replaced it is told once.
    """
    # A mode may have ended when the layers are computed again
    parts = compiled_parts(causal_lm) if _is_on.get() and not torch_compat.operations_are_seen() else None
    if parts is None or parts.refusal is not None or not (parts.forwards or parts.functions):
        yield
        return
    functions = [(layer, model_compat.checkpoint_function(layer), inside) for layer, inside in parts.checkpointed]
    functions = [entry for entry in functions if entry[1] is not None]
    with _in_place(parts.forwards, parts.functions) as forwards:
        _tell_what_was_replaced(parts)
        try:
            for layer, function, inside in functions:
                again = _Recomputation([forward for forward in inside if forward in forwards], parts.functions)
                model_compat.set_checkpoint_function(layer, _CompiledAgain(function, again))
            yield
        finally:
            for layer, function, _ in functions:
                model_compat.set_checkpoint_function(layer, function)


def why_no_kernels(model: nn.Module, device: torch.device) -> str | None:
    """
    Why no norm, MLP or rotary embedding of a model runs in a kernel, or `None`.

    Args:
        model (`nn.Module`): in no wrapper but PEFT's and the compiler's.
        device (`torch.device`): where it is.
    """
    reason = why_not_triton(device)
    if reason is not None:
        return reason
    parts = compiled_parts(model_compat.without_adapter(torch_compat.without_compiler(model)))
    if parts.refusal is None and not (parts.forwards or parts.functions):
        return "its norms, MLPs and rotary embeddings compute something else"
    return parts.refusal


def _why_layers_are_left(causal_lm: PreTrainedModel) -> str | None:
    for module in causal_lm.modules():
        if torch_compat.is_compiled(module):
            return "a part of the model is compiled already"
        if torch_compat.is_checkpoint_wrapper(module):
            return "a wrapper of torch's computes its layers again in backward, as they are"
    return None


class CompiledParts(NamedTuple):
    """
    What is compiled of a model.

    Args:
        forwards (`list`): the forwards of norms and MLPs.
        functions (`list`): functions of its modeling files.
        checkpointed (`list`): the modules of the text model that can checkpoint, each with the forwards in it.
        refusal (`str`, *optional*): why nothing is compiled.
    """

    forwards: list[Forward]
    functions: list[CompiledInFile]
    checkpointed: list[tuple[nn.Module, list[Forward]]]
    refusal: str | None


@LayerMemo
def compiled_parts(causal_lm: PreTrainedModel) -> CompiledParts:
    """What is compiled of a model, as far as it is known here."""
    refusal = _why_layers_are_left(causal_lm)
    if refusal is not None:
        return CompiledParts([], [], [], refusal)
    text_model = architecture.text_model(causal_lm)
    found, functions = find_parts(text_model)
    forwards = [*found.values()]
    checkpointed = [module for module in text_model.modules() if hasattr(module, "gradient_checkpointing")]
    inside = [(layer, [found[m] for m in layer.modules() if m in found]) for layer in checkpointed]
    refusal = None if found or functions else "its norms, MLPs and rotary embeddings are not known"
    return CompiledParts(forwards, functions, inside, refusal)


# Which running forwards need a function in its file: layers on several devices are computed again in several threads
_users: defaultdict[InFile, set[object]] = defaultdict(set)
_lock = threading.Lock()


@contextmanager
def _in_place(forwards: Iterable[Forward], functions: list[CompiledInFile]) -> Generator[set[Forward], None, None]:
    """While it lasts, these forwards and functions stand where the model finds them; those of the user's stay."""
    placed, user = set[Forward](), object()
    try:
        for forward in forwards:
            if forward.change() is None:  # another in its place counts as one
                placed.add(forward)
                forward.module.__dict__["forward"] = forward
        for function in functions:
            _use(function, user)
        yield placed
    finally:
        for function in functions:
            _leave(function, user)
        for forward in placed:
            if vars(forward.module).get("forward") is forward:
                del forward.module.__dict__["forward"]
            if _is_projection(forward):
                forward.shared.forget()


def _is_projection(forward: Forward) -> TypeGuard[ProjectionForward]:
    return isinstance(forward, ProjectionForward)


def _tell_what_was_replaced(parts: CompiledParts) -> None:
    left: dict[str, Forward | CompiledInFile] = {}
    for forward in parts.forwards:
        own = vars(forward.module).get("forward")
        if not isinstance(own, StandIn) and (own is None or not is_library_function(own)):
            left[type(forward.module).__name__] = forward
    left |= {f.place.name: f for f in parts.functions if not isinstance(f.place.read(), CompiledInFile)}
    for name, part in left.items():
        logger.warning_once(f"{name} runs as it is, because {part.change()}.")


def _use(function: CompiledInFile, user: object) -> None:
    with _lock:
        if function.change() is None:
            _users[function.place].add(user)
            function.place.write(function)


def _leave(function: CompiledInFile, user: object) -> None:
    with _lock:
        _users[function.place].discard(user)
        if not _users[function.place] and function.place.read() is function:
            function.place.write(function.original)


class _Recomputation(NamedTuple):
    """What a checkpointed layer ran compiled in its forward, and runs so when it is computed again."""

    forwards: list[Forward]
    functions: list[CompiledInFile]


class _CompiledAgain:
    """The function with which a layer checkpoints, so that the layer is computed again as it runs now."""

    def __init__(self, checkpoint: Callable, again: _Recomputation):
        self.checkpoint, self.again = checkpoint, again

    def __call__(self, function: Callable, *inputs: Any) -> Any:
        return self.checkpoint(functools.partial(_run_compiled, self.again, function), *inputs)

    def __reduce__(self) -> Any:
        return _itself, (self.checkpoint,)  # a copy of the layer is that of any other time


def _itself(checkpoint: Callable) -> Callable:
    return checkpoint


def _run_compiled(again: _Recomputation, function: Callable, *args: Any, **kwargs: Any) -> Any:
    with _in_place(again.forwards, again.functions):
        return function(*args, **kwargs)
