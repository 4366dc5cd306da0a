"""
What checkpointed layers keep for backward beside their inputs, where memory allows it: what attention computed, and of
the last layers everything. Backward takes it from there instead of computing it again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor


class LayerBytes(NamedTuple):
    """
    Bytes that one layer keeps for backward without checkpointing, beside its inputs and weights.

    Args:
        everything (`int`): in all.
        attention (`int`): of these what attention computed.
    """

    everything: int
    attention: int


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
    What the layers of one forward keep, in each run of the model that it is made of.

    Args:
        attention_bytes (`int`): that checkpointed layers may keep of what attention computed, the first layers first.
        padded_tokens (`int`, *optional*):
            Tokens of the rows in TRL's padding. Where the forward has one run, of fewer tokens, what checkpointing
            would keep of the others is added to these bytes, layer by layer.
        checkpointed (`int`, *optional*):
            How many layers of a run are checkpointed. Those behind them, which backward frees first, keep everything.
            By default all are.
        last ([`LastLayers`], *optional*): further bytes that the last layers may keep where there is one run.

    Attributes:
        run (`int`): the number of the run.
        layer (`int`): of the run, the number of the layer that was called last, from 1 on.
    """

    def __init__(
        self,
        attention_bytes: int = 0,
        padded_tokens: int | None = None,
        checkpointed: int | None = None,
        last: LastLayers | None = None,
    ):
        self.attention_bytes, self.padded_tokens, self.checkpointed = attention_bytes, padded_tokens, checkpointed
        self._last, self._bytes_of_last = last, 0
        self.run = self.layer = 0
        self._is_only_run = True

    def begin_run(self, is_only_one: bool) -> None:
        """The layer that is called next is the first one again."""
        self.run += 1
        self.layer, self._is_only_run = 0, is_only_one
        if self.padded_tokens is not None:
            self.attention_bytes = self._bytes_of_last = 0  # another layout may have been tried before

    def next_is_checkpointed(self, *inputs: Any) -> bool:
        """Whether the layer that is called next is checkpointed. Its `inputs` begin with hidden states `[B, L, H]`."""
        self.layer += 1
        hidden = inputs[0] if inputs and self.padded_tokens is not None and self._is_only_run else None
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            tokens = hidden.shape[0] * hidden.shape[1]
            fewer = self.padded_tokens - tokens
            if self.layer == 1 and self._last is not None:
                self._bytes_of_last = self._last.bytes_for(tokens)
            self.attention_bytes += max(0, fewer) * hidden.shape[2] * hidden.element_size()
        return self.checkpointed is None or self.layer <= self.checkpointed

    def takes_attention(self, count: int) -> bool:
        """Whether a layer may keep so many bytes of what attention computed; they are taken then."""
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

    def after_recomputation(
        self, place: tuple[int, int], tensors: list[Tensor], inputs: Iterable[Any], attention: int
    ) -> None:
        """
        A layer was computed again.

        Args:
            place (`tuple[int, int]`): the number of its run, and its own in that.
            tensors (`list[Tensor]`): that it keeps for backward.
            inputs (`Iterable`): what it was called with.
            attention (`int`): bytes of what attention computed.
        """


class MeasuredActivations(KeptActivations):
    """
    Nothing is kept, and what would be is measured.

    Args:
        weights (`Iterable[Tensor]`): what the model has anyway.
        read_peak (`Callable`): gives the most bytes that were allocated at once.

    Attributes:
        found (`dict`): what each layer keeps, by its place.
        peak (`int`): the most bytes that were allocated until backward had computed its first layer again.
    """

    def __init__(self, weights: Iterable[Tensor] = (), read_peak: Callable[[], int] = int):
        super().__init__()
        self.found: dict[tuple[int, int], LayerBytes] = {}
        self.peak = 0
        self._weights, self._read_peak = weights, read_peak

    def costly_results(self) -> "CostlyResults":
        """Attention's results are counted."""
        return CostlyResults(self.takes_attention)

    def after_recomputation(
        self, place: tuple[int, int], tensors: list[Tensor], inputs: Iterable[Any], attention: int
    ) -> None:
        """What it has now is what it would keep."""
        if not self.found:
            self.peak = self._read_peak()
        self.found[place] = LayerBytes(_bytes_beside(tensors, *inputs, *self._weights), attention)

    @property
    def of_layers(self) -> list[LayerBytes]:
        """What the layers keep in the order in which they are called, each the sum over the runs."""
        sums: dict[int, LayerBytes] = {}
        for (_, layer), found in sorted(self.found.items()):
            before = sums.get(layer, LayerBytes(0, 0))
            sums[layer] = LayerBytes(before.everything + found.everything, before.attention + found.attention)
        return [sums[layer] for layer in sorted(sums)]


def _bytes_beside(tensors: list[Tensor], *inputs: Any) -> int:
    """Bytes of the memory that tensors have and inputs have not."""
    known = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(count for place, count in storages.items() if place not in known)


_planned: ContextVar[KeptActivations | None] = ContextVar("_planned", default=None)


@contextmanager
def planned(kept: KeptActivations | None) -> Generator[None, None, None]:
    """While it lasts, each [`begin_run`] is one of this forward."""
    before = _planned.get()
    try:
        _planned.set(kept)
        yield
    finally:
        _planned.set(before)


def begin_run(is_only_one: bool = True) -> None:
    """A run of the model begins: a forward may be made of several."""
    kept = _planned.get()
    if kept is not None:
        kept.begin_run(is_only_one)


class CostlyResults:
    """
    Results within one call of a checkpointed function, kept until the function is called again.

    Args:
        takes (`Callable`): whether so many bytes more are kept; the others are only counted.

    Attributes:
        bytes (`int`): of all of them.
    """

    def __init__(self, takes: Callable[[int], bool]):
        self.bytes = 0
        self._takes = takes
        self._kept: deque[tuple[Tensor, ...] | None] = deque()
        self._is_first, self._is_recalled = True, False

    @contextmanager
    def of_call(self) -> Generator[None, None, None]:
        """While it lasts, the function runs for the first time."""
        before = _running.get()
        try:
            _running.set(self)
            yield
        finally:
            _running.set(before)

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
            count = sum(result.nbytes for result in results)
            self.bytes += count
            self._kept.append(tuple(result.detach() for result in results) if self._takes(count) else None)
        return results


_running: ContextVar[CostlyResults | None] = ContextVar("_running", default=None)


def recalled(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """
    Results that are costly for their size. Where they were kept, the recomputation of a checkpointed function takes
    them from there; they must be the outputs of an autograd function, whose gradients do not go through `compute`.
    """
    results = _running.get()
    return compute() if results is None else results.take_or_compute(compute)
