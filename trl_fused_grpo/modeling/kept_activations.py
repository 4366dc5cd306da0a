"""
What checkpointed layers keep for backward beside their inputs, where memory allows it: what attention computed, and of
the last layers everything. Backward takes it from there instead of computing it again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

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


class KeptActivations:
    """
    What the layers of one forward keep, in each run of the model that it is made of.

    Args:
        attention (`bool`): whether checkpointed layers keep what attention computed.
        checkpointed (`int`, *optional*):
            How many layers of a run are checkpointed. Those behind them, which backward frees first, keep everything.
            By default all are.
        inputs (`Iterable[Tensor]`): what the model has anyway, its weights.

    Attributes:
        layers (`int`): layers that would be checkpointed, counted as they are called; of one run.
        of_layer ([`LayerBytes`], *optional*):
            Of the first layer of each run that backward has computed again, the sum over the runs.
        run (`int`): the number of the run.
    """

    def __init__(self, attention: bool = False, checkpointed: int | None = None, inputs: Iterable[Tensor] = ()):
        self.attention, self.checkpointed, self.inputs = attention, checkpointed, inputs
        self.layers = self.run = self._called = 0
        self.of_layer: LayerBytes | None = None
        self._measured: set[int] = set()

    def begin_run(self) -> None:
        """The layer that is called next is the first one again."""
        self.run += 1
        self._called = 0

    def next_is_checkpointed(self) -> bool:
        """Whether the layer that is called next is checkpointed."""
        self._called += 1
        self.layers = max(self.layers, self._called)
        return self.checkpointed is None or self._called <= self.checkpointed

    def is_measured(self, run: int) -> bool:
        """Whether the bytes of a run's layers are known."""
        return run in self._measured

    def measure(self, run: int, layer: LayerBytes) -> None:
        """Add what a layer of a run keeps."""
        self._measured.add(run)
        before = self.of_layer or LayerBytes(0, 0)
        self.of_layer = LayerBytes(before.everything + layer.everything, before.attention + layer.attention)


_planned: ContextVar[KeptActivations | None] = ContextVar("_planned", default=None)


@contextmanager
def planned(kept: KeptActivations | None) -> Generator[None, None, None]:
    """While it lasts, each [`begin_run`] is one of this forward."""
    token = _planned.set(kept)
    try:
        yield
    finally:
        _planned.reset(token)


def begin_run() -> None:
    """A run of the model begins: a forward may be made of several."""
    kept = _planned.get()
    if kept is not None:
        kept.begin_run()


class CostlyResults:
    """
    Results within one call of a checkpointed function, kept until the function is called again.

    Args:
        are_kept (`bool`): whether they are; otherwise they are only counted.

    Attributes:
        bytes (`int`): of all of them.
    """

    def __init__(self, are_kept: bool):
        self.are_kept, self.bytes = are_kept, 0
        self._kept: deque[tuple[Tensor, ...]] = deque()
        self._is_first, self._is_recalled = True, False

    @contextmanager
    def of_call(self) -> Generator[None, None, None]:
        """While it lasts, the function runs for the first time."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

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
        if self._is_recalled:
            return self._kept.popleft()
        results = compute()
        if self._is_first:
            self.bytes += sum(result.nbytes for result in results)
            if self.are_kept:
                self._kept.append(tuple(result.detach() for result in results))
        return results


_running: ContextVar[CostlyResults | None] = ContextVar("_running", default=None)


def is_recalled() -> bool:
    """Whether a checkpointed function runs that may keep results."""
    return _running.get() is not None


def recalled(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """
    Results that are costly for their size. Where they were kept, the recomputation of a checkpointed function takes
    them from there; they must be the outputs of an autograd function, whose gradients do not go through `compute`.
    """
    results = _running.get()
    return compute() if results is None else results.take_or_compute(compute)
