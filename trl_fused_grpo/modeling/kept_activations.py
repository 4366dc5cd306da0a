"""
What checkpointed layers keep for backward beside their inputs, where memory allows it: what attention computed.
Backward takes it from there instead of computing it again.
"""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from trl_fused_grpo._utils import temporary_value


class LastLayers(NamedTuple):
    """
    Bytes that the last layers keep of what attention computed. Backward, which brings the gradients of weights, frees
    them first.

    Args:
        layers (`int`): of a run.
        bytes_for (`Callable`): the bytes for a forward of so many tokens.
    """

    layers: int
    bytes_for: Callable[[int], int]


class KeptActivations:
    """
    What the layers of one forward keep.

    Args:
        attention_bytes (`int`): that checkpointed layers may keep of what attention computed, the first layers first.
        padded_tokens (`int`, *optional*):
            Tokens of the rows in TRL's padding. Where the forward has fewer, what checkpointing would keep of the
            others is added to these bytes, layer by layer.
        last ([`LastLayers`], *optional*): further bytes that the last layers may keep.

    Attributes:
        layer (`int`): of a run, the number of the layer that was called last, from 1 on.
    """

    def __init__(
        self,
        attention_bytes: int = 0,
        padded_tokens: int | None = None,
        last: LastLayers | None = None,
    ):
        self.attention_bytes, self.padded_tokens = attention_bytes, padded_tokens
        self._last, self._bytes_of_last = last, 0
        self.layer = 0

    def begin_run(self) -> None:
        """The layer that is called next is the first one again."""
        self.layer = 0
        if self.padded_tokens is not None:
            self.attention_bytes = self._bytes_of_last = 0  # another layout may have been tried before

    def begin_layer(self, *inputs: Any) -> None:
        """A checkpointed layer is called. Its `inputs` begin with hidden states `[B, L, H]`."""
        self.layer += 1
        hidden = inputs[0] if inputs and self.padded_tokens is not None else None
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            tokens = hidden.shape[0] * hidden.shape[1]
            fewer = self.padded_tokens - tokens
            if self.layer == 1 and self._last is not None:
                self._bytes_of_last = self._last.bytes_for(tokens)
            self.attention_bytes += max(0, fewer) * hidden.shape[2] * hidden.element_size()

    def takes_attention(self, count: int) -> bool:
        """Return `True` if a layer may keep so many bytes of what attention computed; they are taken then."""
        if self._last is not None and count * (self._last.layers - self.layer + 1) <= self._bytes_of_last:
            self._bytes_of_last -= count
            return True
        if count > self.attention_bytes:
            return False
        self.attention_bytes -= count
        return True

    def costly_results(self) -> "CostlyResults | None":
        """For the layer that was called last: where attention's results go. `None` where none can be kept."""
        return CostlyResults(self.takes_attention) if self.attention_bytes or self._bytes_of_last else None


_planned: ContextVar[KeptActivations | None] = ContextVar("_planned", default=None)


@contextmanager
def planned(kept: KeptActivations | None) -> Generator[None, None, None]:
    """While it lasts, each [`begin_run`] is one of this forward."""
    with temporary_value(_planned, kept):
        yield


def begin_run() -> None:
    """A run of the model begins: a forward may need another with other rows."""
    kept = _planned.get()
    if kept is not None:
        kept.begin_run()


class CostlyResults:
    """
    Results within one call of a checkpointed function, kept until the function is called again.

    Args:
        takes (`Callable`): whether so many bytes more are kept.
    """

    def __init__(self, takes: Callable[[int], bool]):
        self._takes = takes
        self._kept: deque[tuple[Tensor, ...] | None] = deque()
        self._is_first, self._is_recalled = True, False

    @contextmanager
    def of_call(self) -> Generator[None, None, None]:
        """While it lasts, the function runs for the first time."""
        with temporary_value(_running, self):
            yield

    @contextmanager
    def of_recomputation(self) -> Generator[None, None, None]:
        """While it lasts, the function runs again. What it takes of the first time is given up."""
        self._is_first, self._is_recalled = False, bool(self._kept)
        try:
            with self.of_call():
                yield
        finally:
            self._is_recalled = False
            self._kept.clear()

    def take_or_compute(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What was computed at this place the first time, or else what `compute` returns."""
        kept = self._kept.popleft() if self._is_recalled else None
        if kept is not None:
            return kept
        results = compute()
        if self._is_first:
            is_kept = self._takes(sum(result.nbytes for result in results))
            self._kept.append(tuple(result.detach() for result in results) if is_kept else None)
        return results


_running: ContextVar[CostlyResults | None] = ContextVar("_running", default=None)


def recalled(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """
    Results that are costly for their size. Where they were kept, the recomputation of a checkpointed function takes
    them from there; they must be the outputs of an autograd function, whose gradients do not go through `compute`.
    """
    results = _running.get()
    return compute() if results is None else results.take_or_compute(compute)
