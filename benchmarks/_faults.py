"""Exceptions thrown on purpose: into reward functions, generation, the forward with gradients and the backward."""

import gc
import random
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from _left_over import left_over
from torch.nn import functional as F
from transformers import TrainerCallback


PLACES = ("reward", "generation", "forward", "backward", "optimizer")
# A place is reached many times in a step; the fault comes at one of so many
_TIMES = {"reward": 1, "generation": 30, "forward": 60, "backward": 30, "optimizer": 1}
# Transformers' attention stays replaced as long as a graph may need it
_HELD_BY_GRAPHS = ("tables", "masks", "files")


class InjectedError(RuntimeError):
    """A fault thrown on purpose."""


class Faults(TrainerCallback):
    """
    Throws with a probability in each optimizer step, at a place drawn at random.

    Args:
        probability (`float`): of a fault in a step.
        seed (`int`): from which steps and places are drawn.

    Attributes:
        thrown (`Counter`): how many faults there were at each place.
    """

    def __init__(self, probability: float, seed: int = 0):
        self.probability, self.random = probability, random.Random(seed)
        self.thrown: Counter[str] = Counter()
        self.place: str | None = None
        self.times_left, self.in_backward = 0, False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Draw whether this step has a fault, and where."""
        if self.place is None and self.random.random() < self.probability:
            self.place = self.random.choice(PLACES)
            self.times_left = self.random.randint(1, _TIMES[self.place])

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The gradients are complete, and the weights have not moved."""
        self.reach("optimizer")

    def reach(self, place: str) -> None:
        """
        A place was reached.

        Raises:
            [`InjectedError`]: when it is time.
        """
        if place != self.place:
            return
        self.times_left -= 1
        if self.times_left <= 0:
            self.place = None
            self.thrown[place] += 1
            raise InjectedError(place)

    @contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """
        While it lasts, faults may come. torch's own functions are replaced: a hook or a replaced forward would be a
        customisation, for which faster paths are left.
        """
        linear, backward = F.linear, torch.autograd.backward

        def counted_linear(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what is compiled must not depend on a count
                return linear(*args, **kwargs)
            if self.in_backward:
                self.reach("backward")
            else:
                self.reach("forward" if torch.is_grad_enabled() else "generation")
            return linear(*args, **kwargs)

        def counted_backward(*args: Any, **kwargs: Any) -> None:
            self.in_backward, before = True, self.in_backward
            try:
                backward(*args, **kwargs)
                self.reach("backward")
            finally:
                self.in_backward = before

        of_linear = mock.patch.object(F, "linear", counted_linear)
        with of_linear, mock.patch.object(torch.autograd, "backward", counted_backward):
            yield


def left_after_fault(trainer: Any, clean: dict[str, Any], seconds: float = 5.0) -> dict[str, Any]:
    """
    What is left over after a training that an exception has ended, which is gone.

    On CUDA a backward runs in a thread of autograd's. It lets go of its exception, whose traceback holds the graph,
    after that has reached the thread of the training: some milliseconds later where processes wait for a core. So for
    what graphs hold, and for nothing else, there is a while of waiting.

    Args:
        trainer (`GRPOTrainer`): that does not train now.
        clean (`dict`): what a training leaves behind that ends by itself.
        seconds (`float`): to wait at most.
    """
    gc.collect()  # what the exception held
    found = left_over(trainer)
    end = time.monotonic() + seconds
    while any(found[name] != clean[name] for name in _HELD_BY_GRAPHS) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
        now = left_over(trainer)
        found |= {name: now[name] for name in _HELD_BY_GRAPHS}
    return found
