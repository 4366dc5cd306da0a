"""Gradient checkpointing as torch does it without reentrance, with less CPU time for every saved tensor."""

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, get_device_states, set_device_states

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat

from .kept_activations import KeptActivations, planned


# Weak references: a list with the model itself would keep it alive for good
_LAYERS: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()


@contextmanager
def lean_checkpoints(model: nn.Module, kept: KeptActivations | None = None) -> Generator[None, None, None]:
    """
    While it lasts, the layers of a transformers model that checkpoint through torch's function without reentrance and
    without further options do it through [`checkpoint`]. What is recomputed later, in backward, goes with it. Compiled
    models stay as they are: the compiler knows torch's function.

    Args:
        model (`nn.Module`): in no wrapper but PEFT's.
        kept ([`KeptActivations`], *optional*): what layers keep in the one forward that runs meanwhile.
    """
    if model not in _LAYERS:  # a walk over all modules takes as long as a layer
        modules = list(model.modules())
        is_compiled = any(map(torch_compat.is_compiled, modules))
        _LAYERS[model] = [] if is_compiled else [ref(m) for m in modules if hasattr(m, "gradient_checkpointing")]
    found = [layer for weak in _LAYERS[model] if (layer := weak()) is not None]
    layers: list[Any] = [layer for layer in found if _is_replaceable(layer)]
    replaced = [(layer, model_compat.checkpoint_function(layer)) for layer in layers]
    function = checkpoint if kept is None else functools.partial(_checkpoint, kept)
    try:
        for layer, _ in replaced:
            model_compat.set_checkpoint_function(layer, function)
        with planned(kept):
            yield
    finally:
        for layer, original in replaced:
            model_compat.set_checkpoint_function(layer, original)


def _is_replaceable(layer: Any) -> bool:
    function = model_compat.checkpoint_function(layer)
    is_torch = isinstance(function, functools.partial) and function.func is torch.utils.checkpoint.checkpoint
    return bool(layer.gradient_checkpointing) and is_torch and function.keywords == {"use_reentrant": False}


def checkpoint(function: Callable, *args: Any) -> Any:
    """
    Call a function without keeping the tensors that its backward needs: backward calls the function again.

    torch's function keeps an object, weak references and metadata for each saved tensor, and sets random states in
    every recomputation. Here a saved tensor is a number, and random states are restored where the forward drew from
    them. The recomputation stops, as there, as soon as nothing more is needed.

    Args:
        function (`Callable`): what to call, on the same device and with the same results every time.
        args: its arguments.

    Raises:
        [`torch.utils.checkpoint.CheckpointError`]:
            In backward, when other tensors are computed than before.
    """
    return _checkpoint(None, function, *args)


def _checkpoint(kept: KeptActivations | None, function: Callable, *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    if kept is not None:
        kept.begin_layer(*args)
    frame = _CheckpointFrame(function, args, kept)
    before = frame.random_states()
    with saved_tensors_hooks(frame.pack, frame.unpack), frame.costly.of_call() if frame.costly else nullcontext():
        result = function(*args)
    if not all(map(torch.equal, before, frame.random_states())):
        frame.states_before = before
    return result


class _StopRecomputation(Exception):  # noqa: N818 - not an error
    """Every tensor that the forward had saved is there again."""


class _CheckpointFrame:
    """
    The tensors that one call saved for backward, each by a number: their sizes, and the tensors themselves while
    backward runs.
    """

    def __init__(self, function: Callable, args: tuple[Any, ...], kept: KeptActivations | None):
        self.function, self.args = function, args
        self.costly = None if kept is None else kept.costly_results()
        # Of layers that are called with keywords alone nothing is known, and torch takes the accelerator's too
        unknown = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_type = next((a.device.type for a in args if isinstance(a, Tensor)), unknown)
        self.devices = self._devices()
        self.casts = [
            (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in {"cpu", self.device_type}
        ]
        self.caches_casts = torch.is_autocast_cache_enabled()
        self.states_before: list[Tensor] | None = None
        self.sizes: list[int] = []  # plain numbers: thousands of shapes would keep the garbage collector busy
        self.tensors: list[Tensor | None] = []

    def _devices(self) -> list[int]:
        if self.device_type not in ("cpu", "cuda"):
            return get_device_states(*self.args)[0]
        return sorted({a.device.index for a in self.args if isinstance(a, Tensor) and a.is_cuda})

    def random_states(self) -> list[Tensor]:
        if self.device_type not in ("cpu", "cuda"):
            return [torch.get_rng_state(), *get_device_states(*self.args)[1]]
        # Asked for twice in every layer: torch's functions switch devices to ask their generators
        generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in self.devices)]
        return [generator.get_state() for generator in generators]

    def pack(self, tensor: Tensor) -> int:
        self.sizes.append(tensor.numel())
        return len(self.sizes) - 1

    def unpack(self, number: int) -> Tensor:
        if not self.tensors or self.tensors[number] is None:
            self.tensors = self._recompute()
        tensor, self.tensors[number] = self.tensors[number], None  # each is asked for once in a backward
        assert tensor is not None
        return tensor

    def _recompute(self) -> list[Tensor | None]:
        tensors: list[Tensor | None] = []
        last = len(self.sizes)

        def keep(tensor: Tensor) -> None:
            tensors.append(tensor.detach())
            if len(tensors) == last:
                raise _StopRecomputation

        with ExitStack() as stack:
            self._restore(stack)
            stack.enter_context(saved_tensors_hooks(keep, _never))
            if self.costly is not None:
                stack.enter_context(self.costly.of_recomputation())
            with suppress(_StopRecomputation):
                self.function(*self.args)
        found = [tensor for tensor in tensors if tensor is not None]
        if [tensor.numel() for tensor in found] != self.sizes:
            raise CheckpointError(
                "the recomputation of a checkpointed layer saved other tensors than its forward: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False, 'determinism_check': 'default'}, and torch's "
                "own checkpointing names them."
            )
        return tensors

    def _restore(self, stack: ExitStack) -> None:
        """Grad mode, casts and random states as they were in the forward."""
        stack.enter_context(torch.enable_grad())
        for device_type, enabled, dtype in self.casts:
            if enabled or torch.is_autocast_enabled(device_type):
                context = torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=self.caches_casts)
                stack.enter_context(context)
        if self.states_before is not None:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=self.device_type))
            torch.set_rng_state(self.states_before[0])
            set_device_states(self.devices, self.states_before[1:], device_type=self.device_type)


def _never(_: None) -> Tensor:
    raise AssertionError("there is no backward through a recomputation")
