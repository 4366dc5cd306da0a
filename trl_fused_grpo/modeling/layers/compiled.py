"""
Decoder layers compiled by torch, one code for all layers of a kind. torch's partitioner decides what each keeps for
backward, in place of checkpointing. A layer that torch cannot compile runs as it is.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._utils import temporary_attr, walks_once
from trl_fused_grpo.modeling.attention.watch import WatchedCall
from trl_fused_grpo.ops.kernels import why_not_triton

from .memo import layers_of
from .unpacked import unpacked_layers


logger = logging.get_logger(__name__)

# The share of what a layer would keep for backward without checkpointing that a checkpointed one may: its inputs, as
# with checkpointing. More gains little for its memory (`benchmarks/NOTES.md`)
CHECKPOINTED_BUDGET = 0.0

# By class of layers, and the share of what they would keep for backward that they may
_compiled: dict[tuple[type, float], Callable] = {}
# Classes that torch could not compile, with the reason
_refused: dict[type, str] = {}
# Those that draw random numbers, which torch's checkpointing draws again as they were
_drawing: set[type] = set()


def why_not_compiled(asked: bool | None, device: torch.device) -> str | None:
    """Return why the layers of no model are compiled on a device, or `None`."""
    if asked is False:
        return "fused_compile=False"
    return None if asked else why_not_triton(device)


@walks_once
def layers_to_compile(model: nn.Module) -> tuple[list[tuple[int, Any]], str | None]:
    """
    The decoder layers of a model that can run compiled, each with its number, and where there are none the reason.
    """
    causal_lm = model_compat.causal_lm_of(model)
    layers = layers_of(architecture.text_model(causal_lm))
    reason = _why_left_alone(model, layers)
    if reason is not None:
        return [], reason
    unpacked = unpacked_layers(causal_lm)
    apart = {*unpacked.with_state, *unpacked.attention}
    reasons = [_refused.get(type(layer)) or _why_as_it_is(layer, apart) for layer in layers]
    found = [(index, layer) for index, layer in enumerate(layers) if reasons[index] is None]
    return found, None if found else reasons[0]


def _why_left_alone(model: nn.Module, layers: list[nn.Module]) -> str | None:
    if any(map(torch_compat.is_compiled, torch_compat.modules_of(model))):
        return "the model, or a part of it, is compiled already"
    if torch_compat.compiler_is_off():
        return "torch.compile is switched off"
    return None if layers else "its decoder layers are not known"


def _why_as_it_is(layer: nn.Module, apart: set[nn.Module]) -> str | None:
    if not isinstance(layer, model_compat.GradientCheckpointingLayer):
        return f"{type(layer).__name__} is no layer that transformers checkpoints"
    for module in torch_compat.modules_of(layer):
        own = vars(module)  # of thousands of modules, in every forward
        if module in apart:
            return f"{type(module).__name__} runs on rows of its own"
        if module is not layer and any(map(own.get, torch_compat.HOOKS)):
            return f"a hook on {type(module).__name__} runs inside of {type(layer).__name__}"
        if model_compat.writes_weights(type(module)):  # in compiled code that changes what the backward reads
            return f"{type(module).__name__} writes to its weights in its forward"
        if "forward" in own:  # as Accelerate's for weights that wait on another device
            return f"{type(module).__name__} has a forward of its own"
    gathers = torch_compat.is_fsdp2(layer)  # before its forward is called
    for weight in torch_compat.parameters_of(layer):
        if hasattr(weight, "ds_id") or not (gathers or type(weight) is nn.Parameter):
            return f"{type(layer).__name__} has weights that are gathered, or computed, when they are read"
    return None


@contextmanager
def compiled_layers(
    causal_lm: PreTrainedModel, layers: Sequence[tuple[int, Any]], call: WatchedCall | None
) -> Generator[None, None, None]:
    """
    While it lasts, these layers of a model, from [`layers_to_compile`], run compiled on the packed row that `call`
    watches.
    """
    is_seen = torch_compat.operations_are_seen() or torch.is_inference_mode_enabled()
    if not layers or is_seen or call is None:
        yield
        return
    config = causal_lm.config.get_text_config()
    is_checkpointed = any(layer.gradient_checkpointing and layer.training for _, layer in layers)
    budget = CHECKPOINTED_BUDGET if is_checkpointed else 1.0
    with torch_compat.compiled_with(budget), ExitStack() as stack:
        for index, layer in layers:
            place = SimpleNamespace(config=config, layer_idx=index)
            torch_compat.let_share_code(layer)
            stack.enter_context(temporary_attr(layer, "forward", _CompiledLayer(layer, place, call, budget)))
            stack.enter_context(temporary_attr(layer, "gradient_checkpointing", False))
        yield


class _CompiledLayer:
    """The forward of a layer on one packed row."""

    def __init__(self, layer: Any, place: Any, call: WatchedCall, budget: float):
        self.layer, self.place, self.call, self.cls, self.budget = layer, place, call, type(layer), budget

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Checkpointing makes the first layer's input require gradients. Where none are computed, that layer would have
        # a compiled code of its own
        hidden_states = hidden_states if torch.is_grad_enabled() else hidden_states.detach()
        if self.cls not in _refused:
            try:
                return self._compiled(hidden_states, *args, **self._packed(kwargs))
            except torch_compat.compiler_errors() as error:
                if torch_compat.draws_random_numbers(error):
                    _drawing.add(self.cls)
                    return self(hidden_states, *args, **kwargs)
                reason = " ".join(str(error).split("\n")[:2])
                _refused[self.cls] = f"torch cannot compile {self.cls.__name__}: {reason}"
                logger.warning_once(f"Decoder layers run as they are, because {_refused[self.cls]}.")
        forward = partial(_without_checkpointing, self.layer, **kwargs)
        if self.budget < 1 and torch.is_grad_enabled():
            return getattr(self.layer, model_compat.CHECKPOINT_FUNCTION)(forward, hidden_states, *args)
        return forward(hidden_states, *args)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if self.cls not in _drawing:
            return _compiled_for(self.cls, self.budget)(self.layer, *args, **kwargs)
        if self.budget < 1 and torch.is_grad_enabled():
            return checkpoint(_keeping_all, self.layer, *args, use_reentrant=False, **kwargs)
        return _keeping_all(self.layer, *args, **kwargs)

    def _packed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments that are tensors and numbers, with the window of the layer's mask."""
        kwargs, window = self.call.masked(self.place, kwargs)
        return {**{name: value for name, value in kwargs.items() if name != "watched"}, "packed_window": window}


def _without_checkpointing(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer as it is, also when it is computed again."""
    with temporary_attr(layer, "gradient_checkpointing", False):
        return type(layer).forward(layer, *args, **kwargs)


def _keeping_all(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The compiled layer without a memory budget, also when it is computed again."""
    with temporary_attr(layer, "gradient_checkpointing", False), torch_compat.compiled_with(1.0):
        return _compiled_for(type(layer), 1.0)(layer, *args, **kwargs)


def _compiled_for(cls: type, budget: float) -> Callable:
    kind = cls, budget
    if kind not in _compiled:

        def compiled(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return type(layer).forward(layer, *args, **kwargs)

        # With a code object of its own: what torch compiles is kept by code
        code = compiled.__code__.replace(co_name=f"fused_{cls.__name__}_{len(_compiled)}")
        function = FunctionType(code, compiled.__globals__, code.co_name, None, compiled.__closure__)
        _compiled[kind] = torch.compile(function, dynamic=True, fullgraph=True, backend=torch_compat.inductor)
    return _compiled[kind]
