"""
Memory that runs out in a forward on one process of several.

FSDP gathers the weights of a layer from all processes when the layer is called. So a process whose memory has run out
calls the other layers too. They return what they are given, and then all processes hear of it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._utils import temporary_attr

from .output_projection import head_parameter_modules


_Result = TypeVar("_Result")

# Classes of layers that were seen to return hidden states as they get them, and nothing else
_RETURN_HIDDEN_STATES: set[type] = set()


def layers_with_shards(causal_lm: PreTrainedModel) -> list[nn.Module] | None:
    """
    The layers of a causal model at which FSDP gathers weights, without embedding and head; `None` where a forward may
    gather them at others than these, each once.
    """
    ends = {causal_lm, causal_lm.get_input_embeddings(), *head_parameter_modules(causal_lm)}
    units = [m for m in causal_lm.modules() if isinstance(m, (FSDPModule, FullyShardedDataParallel))]
    layers: list[nn.Module] = [layer for unit in units if (layer := torch_compat.without_fsdp1(unit)) not in ends]
    parts = {part for layer in layers for part in layer.modules() if part is not layer}
    is_nested = any(unit in parts for unit in units)
    return None if is_nested or architecture.may_take_images(causal_lm) else layers


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def _remember(layer: nn.Module, hidden: Any, output: Any) -> None:
    if isinstance(output, Tensor) and isinstance(hidden, Tensor) and output.shape == hidden.shape:
        _RETURN_HIDDEN_STATES.add(type(layer))


class SharedOutOfMemoryError(torch.OutOfMemoryError):
    """Memory ran out in a forward, on this process or on another one: every process raises it."""


class MemoryWatch:
    """
    Watches one forward of the model.

    Args:
        on_any_process (`Callable`): whether a condition holds on any process. All call it once, after the forward.
        layers (`Sequence[nn.Module]`): in the order in which the forward calls them; processes wait for one another at
            each. Empty where they do not wait within a forward.

    Attributes:
        has_run_out (`bool`): whether memory has run out on this process.
    """

    def __init__(self, on_any_process: Callable[[bool], bool], layers: Sequence[nn.Module] = ()):
        self._on_any_process, self.layers = on_any_process, layers
        self._message: str | None = None
        self._called = 0
        self._ran_out_anywhere = False

    @property
    def has_run_out(self) -> bool:
        return self._message is not None

    def attempt(self, compute: Callable[[], _Result]) -> _Result | None:
        """What `compute` returns. `None` when memory has run out before or runs out in it."""
        if self.has_run_out:
            return None
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if self._called < len(self.layers):  # others wait at a layer that this process has not called
                raise
            self._message = str(error)  # the error itself would keep what its frames hold
        return None

    @contextmanager
    def around_layers(self) -> Generator[None, None, None]:
        """While it lasts, a layer in which memory runs out, and each behind it, returns the hidden states it got."""
        with ExitStack() as stack:
            for layer in self.layers:
                forward = partial(self._run_layer, layer, layer.forward)
                stack.enter_context(temporary_attr(layer, "forward", forward))
            yield

    def _run_layer(self, layer: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        self._called += 1
        hidden: Any = _hidden_states(args, kwargs)
        if self.has_run_out:
            return hidden.view_as(hidden)
        try:
            output = forward(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if type(layer) not in _RETURN_HIDDEN_STATES:
                raise
            self._message = str(error)
            return hidden.view_as(hidden)
        _remember(layer, hidden, output)
        return output

    def tell(self) -> None:
        """
        Tell the other processes, within the forward.

        Raises:
            [`SharedOutOfMemoryError`]: when memory ran out on any process, where none waits in the wrappers around the
                forward: they have not begun what follows one. Else [`check`] raises it.
        """
        self._ran_out_anywhere = self._on_any_process(self.has_run_out)
        if not self.layers:
            self.check()

    def check(self) -> None:
        """
        Raise, after the forward, when memory ran out on any process.

        Raises:
            [`SharedOutOfMemoryError`]: then.
        """
        if self._ran_out_anywhere:
            raise SharedOutOfMemoryError(self._message or "memory ran out on another process")
