"""Takes one trainer through a case by its own training, evaluation or log-prob step, and collects the outcome."""

import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from transformers import set_seed

from trl_fused_grpo._compat import trl as trl_compat

from .case import Case, Rollout, SkippedError, Trainer
from .tiny.batches import Data, log_probs, serve_batches, serve_rollouts, serves_batches
from .trainers import load_weights


# Standard deviation of the weights' step between accumulation windows: ratios leave 1 but not the clip bounds
STEP = 0.0005
_NOT_COMPARED = ("step_time", "fused/")  # timings, and what only the fused trainer logs


@dataclass
class Outcome:
    """
    What came out of a trainer.

    Attributes:
        loss (`float`): sum of the micro-batches' losses.
        tensors (`dict[str, torch.Tensor]`): gradient of every parameter after each accumulation window, or log-probs
            and entropies. On the CPU.
        metrics (`dict[str, list[float]]`): what TRL would log after each accumulation window: micro-batches' average.
        rows (`int`, *optional*): rows whose log-probs were computed, over all forwards, if the trainer counts them.
        recomputed (`int`, *optional*): how many of these rows backward computed a second time.
        layout (`str`, *optional*): how the fused trainer laid the rows out: `"packed"` or `"padded"`.
    """

    loss: float = 0.0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    rows: int | None = None
    recomputed: int | None = None
    layout: str | None = None

    @property
    def norm(self) -> float:
        """The Euclidean norm of all tensors together."""
        return float(sum(t.double().square().sum() for t in self.tensors.values()) ** 0.5)


@contextmanager
def stock_may_fail(case: Case) -> Generator[None, None, None]:
    """Within the context stock runs. Where it fails as the case says, the case is skipped."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        if isinstance(error, SkippedError) or not any(part in message for part in case.stock_fails):
            raise
        raise SkippedError(f"stock itself fails: {type(error).__name__}: {message[:120]}") from error


class Restarted:
    """
    A trainer that runs several batches, each from the same start: to build one takes longer than to run one.

    Args:
        trainer ([`GRPOTrainer`]): freshly built.
        start (`Mapping[str, torch.Tensor]`): weights by parameter name.
    """

    def __init__(self, trainer: Trainer, start: Mapping[str, torch.Tensor]):
        self._trainer, self._start = trainer, start
        # Counters, coefficients, switches, and what is not there yet. Lists and tensors are a run's to clear
        kept = (type(None), bool, int, float, str)
        self._values = [
            (vars(holder), {name: value for name, value in vars(holder).items() if isinstance(value, kept)})
            for holder in (trainer, trainer.state)
        ]

    def __call__(self) -> Trainer:
        """Return the trainer as it was built, with the weights of the start."""
        for attributes, values in self._values:
            attributes.update(values)
        return load_weights(self._trainer, self._start)


def run_case(
    trainer: Trainer,
    case: Case,
    data: Data,
    dtype: torch.dtype,
    after_step: Callable[[Trainer, int], None] | None = None,
) -> Outcome:
    """
    Run a case through a trainer's own step, and return what came out.

    Args:
        trainer ([`GRPOTrainer`]): freshly built, or [`Restarted`].
        case ([`Case`]): what to run.
        data (`list[dict]`): from [`tiny.batches.make_data`].
        dtype (`torch.dtype`): what weights are rounded to when they move, whatever the trainer computes in.
        after_step (`Callable`, *optional*): gets the trainer and the accumulation window's number after a micro-batch.
    """
    set_seed(0)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    if isinstance(case.data, Rollout):
        serve_rollouts(trainer, data)
    elif case.mode != "log-probs":
        serve_batches(trainer, data)
    with _served_in_rows(trainer):
        if case.mode == "train":
            return _train(trainer, case, dtype, after_step)
        return _evaluate(trainer) if case.mode == "eval" else _log_probs(trainer, data)


@contextmanager
def _served_in_rows(trainer: Trainer) -> Generator[None, None, None]:
    """
    While it lasts, what serves micro-batches counts as code that sees them and no more. Before TRL 1.14 a replaced
    method may read log-probs of padding too, and no case would have rows without padding.
    """
    if not (serves_batches(trainer) and hasattr(trainer, "_fused")):
        yield
        return
    ladder = trainer._fused.ladder
    findings: Any = sys.modules[type(ladder).__module__]
    replaced_method = findings.replaced_method

    def not_served(trainer: Trainer, names: Iterable[str]) -> str | None:
        return replaced_method(trainer, [n for n in names if n != "_prepare_inputs" or not serves_batches(trainer)])

    ladder.fall(findings.Reason(findings.Level.ROWS, "micro-batches are served"))
    with mock.patch.object(findings, "replaced_method", not_served):
        yield


def _collect_metrics(trainer: Trainer, mode: str, outcome: Outcome) -> None:
    metrics = trl_compat.metrics_of(trainer, mode)
    for name, values in metrics.items():
        if values and not name.startswith(_NOT_COMPARED):
            outcome.metrics.setdefault(name, []).append(math.fsum(values) / len(values))
    metrics.clear()


def _train(
    trainer: Trainer, case: Case, dtype: torch.dtype, after_step: Callable[[Trainer, int], None] | None
) -> Outcome:
    args = trainer.args
    outcome, forwards = Outcome(), {}  # what several micro-batches share, the backward of the last completes
    model = trainer.model_wrapped
    generation = [trainer.train_dataset[0]] * args.per_device_train_batch_size * args.steps_per_generation
    for window in range(case.accumulation_windows):
        model.zero_grad()
        for i in range(args.gradient_accumulation_steps):
            last = i == args.gradient_accumulation_steps - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            outcome.loss += float(trainer.training_step(model, generation, None))
            if (stats := getattr(trainer, "fused_stats", None)) is not None:
                outcome.layout = trainer.fused_layout()
                forwards[id(stats)] = stats
            if after_step is not None:
                after_step(trainer, window)
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                outcome.tensors[f"{name} (window {window})" if window else name] = gradient.detach().cpu().clone()
        _collect_metrics(trainer, "train", outcome)
        if case.update:
            _move_weights(trainer, window, dtype)
    if forwards:
        outcome.rows = sum(stats.rows for stats in forwards.values())
        outcome.recomputed = sum(stats.recomputed for stats in forwards.values())
    return outcome


@torch.no_grad()
def _move_weights(trainer: Trainer, window: int, dtype: torch.dtype) -> None:
    """Move the weights by a seeded random step, the same for every trainer whatever its gradients are."""
    generator = torch.Generator().manual_seed(window)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            step = STEP * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.to(dtype) + step.to(parameter.device, dtype))


def _evaluate(trainer: Trainer) -> Outcome:
    trainer.model.eval()
    examples = [trainer.train_dataset[0]] * trainer.args.per_device_train_batch_size
    loss, *_ = trainer.prediction_step(trainer.model_wrapped, examples, prediction_loss_only=True)
    outcome = Outcome(loss=float(loss))
    _collect_metrics(trainer, "eval", outcome)
    return outcome


def _log_probs(trainer: Trainer, data: Data) -> Outcome:
    logps, entropies = log_probs(trainer, data[0], batch_size=2)
    mask = data[0]["completion_mask"].bool()
    return Outcome(float(logps[mask].mean()), {"log-probs": logps[mask], "entropies": entropies[mask]})
