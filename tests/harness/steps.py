"""Takes one trainer through the single steps of a drawn case, with what a user changes, and notes what tells ties."""

import sys
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

import trl_fused_grpo
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity import run_case, trainers
from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.tiny import batches
from trl_fused_grpo.parity.tiny.batches import Data
from trl_fused_grpo.parity.trainers import Settings, StockGRPOTrainer

from .case import DrawnCase


@dataclass
class Outcome(run_case.Outcome):
    """
    What came out of a trainer.

    Attributes:
        leaves_out (`set[int]`):
            Accumulation windows in which the fused trainer left sequences out (`fused_skip_zero_grad_sequences`).
        verified (`dict[int, list[float]]`):
            What `fused_verify` logged in each window.
        high_entropy (`list[torch.Tensor]`):
            Which tokens TRL's `top_entropy_quantile` trains on, one vector for each loss. On the CPU.
        masked (`list[torch.Tensor]`):
            Which tokens or sequences TRL's `mask` modes leave out, as vLLM's importance ratio is beyond a bound: one
            matrix for each micro-batch. On the CPU.
    """

    leaves_out: set[int] = field(default_factory=set)
    verified: dict[int, list[float]] = field(default_factory=dict)
    high_entropy: list[torch.Tensor] = field(default_factory=list)
    masked: list[torch.Tensor] = field(default_factory=list)


def stock_trainer(case: DrawnCase, settings: Settings) -> Trainer:
    """Stock TRL's, or a subclass of the user's, see [`trainers.stock_trainer`]."""
    return _built(trainers.stock_trainer(case, settings, _class_of(case, StockGRPOTrainer)))


def float64_trainer(case: DrawnCase, settings: Settings) -> Trainer:
    """The reference for bfloat16, see [`trainers.float64_trainer`]."""
    return _built(trainers.float64_trainer(case, settings, _class_of(case, StockGRPOTrainer)))


def fused_trainer(case: DrawnCase, settings: Settings) -> Trainer:
    """The trainer under test, or a subclass of the user's."""
    cls = _class_of(case, class_under_test(settings))
    return _built(trainers.fused_trainer(case, replace(settings, fused_class=cls)))


def class_under_test(settings: Settings) -> Any:
    """The class of the fused trainer."""
    return settings.fused_class or trl_fused_grpo.FusedGRPOTrainer


def _class_of(case: DrawnCase, cls: Any) -> Callable[..., Trainer]:
    make = case.customised.make_class
    return cls if make is None else make(cls)


def _built(trainer: Trainer) -> Trainer:
    trainer.seen = []  # by customisations
    return trainer


def make_data(case: DrawnCase, trainer: Trainer, seed: int) -> Data:
    """Make the data of a case, see [`batches.make_data`]. Ties at the entropy quantile are recognised later."""
    return batches.make_data(case, trainer, seed, draws=1)


def run_steps(trainer: Trainer, case: DrawnCase, data: Data, dtype: torch.dtype) -> Outcome:
    """Run a case through a trainer's own step, see [`run_case.run_case`]."""
    outcome = Outcome()

    def note(trainer: Trainer, window: int) -> None:
        stats = getattr(trainer, "fused_stats", None)
        if stats is not None and stats.leaves_out:
            outcome.leaves_out.add(window)
        metrics = trl_compat.metrics_of(trainer)
        outcome.verified[window] = list(metrics.get("fused/verify_logps", []))
        _note_masked(trainer, outcome)

    change = case.customised.change_trainer
    trainer.seen.clear()
    context = None if change is None else change(trainer)
    with _high_entropy_noted() as outcome.high_entropy, context or nullcontext():
        ran = run_case.run_case(trainer, case, data, dtype, note)
    vars(outcome).update(vars(ran))
    if trainer.seen:
        outcome.metrics["what the user's code saw"] = [_as_number(value) for value in trainer.seen]
    return outcome


def _note_masked(trainer: Trainer, outcome: Outcome) -> None:
    """Of the micro-batch that has just been trained on, if the trainer generated it."""
    micro_batches = trl_compat.buffered_micro_batches(trainer)
    if micro_batches:
        place = (trl_compat.step_of(trainer) - 1) % trl_compat.steps_per_generation(trainer)
        ratio = micro_batches[place].get("importance_sampling_ratio")
        if ratio is not None:
            outcome.masked.append((ratio == 0.0).cpu())


@contextmanager
def _high_entropy_noted() -> Generator[list[torch.Tensor], None, None]:
    """
    While it lasts, notes which entropies are at least the quantile that TRL asks torch for, under the name that torch
    has in TRL's file. No method of the trainer and no function of torch's may be replaced for it: the fused trainer
    would take a lower level.
    """
    noted: list[torch.Tensor] = []

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def quantile(entropies: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            threshold = torch.quantile(entropies, *args, **kwargs)
            noted.append((entropies.detach() >= threshold).cpu())
            return threshold

    with mock.patch.object(sys.modules[StockGRPOTrainer.__module__], "torch", Torch()):
        yield noted


def _as_number(value: Any) -> float:
    """A number as it is, and of anything else one that equal things have in common."""
    return float(value) if isinstance(value, (int, float)) else float(zlib.crc32(repr(value).encode()))
