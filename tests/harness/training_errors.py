"""Measures how far two trainings are apart: change of weights, logs, what callbacks and hooks saw."""

import math
from typing import Any, Protocol

from trl_fused_grpo.parity.case import SkippedError
from trl_fused_grpo.parity.judge import Errors, close, measure

from .case import Training
from .run_training import Pair, Run


# float32: the change of all weights and of each, relative to stock's, beside the rounding of the weights themselves
UPDATE_TOLERANCE = 1e-5


class Figures(Protocol):
    """The fields of a [`Result`] that a training fills in."""

    loss: float | None
    loss_error: float | None
    gradient_error: float | None
    worst_parameter: str | None
    metrics_differ: list[str]
    fused_ratio: float | None
    recomputed: float | None
    layout: str | None


def problems_of(case: Training, pair: Pair, figures: Figures) -> list[str]:
    """
    Compare each of the fused trainer's runs with stock's.

    Args:
        case ([`Training`]):
            What ran.
        pair ([`Pair`]):
            The trainings.
        figures ([`Result`]):
            Gets the figures of the fused run with the largest error.

    Returns:
        `list[str]`:
            What is not equal. What two runs have in common stands once.

    Raises:
        [`SkippedError`]:
            When stock's weights move by rounding alone, and the fused trainer's do not.
    """
    problems: list[str] = []
    worst = -1.0
    if case.customised.has_no_update and _moves(pair.stock) and not any(map(_moves, pair.fused.values())):
        raise SkippedError("stock moves here by rounding alone, the fused trainer does not")
    for tokens, fused in pair.fused.items():
        errors = update_errors(pair.stock, fused)
        if _worst(errors) > worst:
            worst = _worst(errors)
            _fill(figures, pair.stock, fused, errors)
        where = "" if tokens is None else f" (fused_max_tokens_per_forward={tokens})"
        of_run = _problems_of_run(case, pair.stock, fused, errors)
        problems += [problem + where for problem in of_run if problem not in problems]
    return problems


def _moves(run: Run) -> bool:
    return any(bool(change.any()) for change in run.change.values())


def update_errors(stock: Run, fused: Run) -> Errors:
    """
    Errors of the change of weights, less the rounding of float32 after each step.

    Where stock's weight does not move at all, any move is an infinite error.
    """
    errors = measure([stock.outcome], [fused.outcome])
    sizes = {name: float(change.double().norm()) for name, change in stock.change.items()}
    parameters = {
        name: max(error - stock.rounding[name] / sizes[name], 0.0) if sizes[name] else error
        for name, error in errors.parameters.items()
    }
    return Errors(errors.loss, errors.gradient, parameters)


def _worst(errors: Errors) -> float:
    error = max(errors.gradient, errors.parameters.get(errors.worst_parameter or "", 0.0))
    return math.inf if math.isnan(error) else error


def _fill(figures: Figures, stock: Run, fused: Run, errors: Errors) -> None:
    figures.loss, figures.loss_error = stock.outcome.loss, errors.loss
    figures.worst_parameter = errors.worst_parameter
    figures.gradient_error = errors.parameters.get(errors.worst_parameter or "", errors.gradient)
    norm = stock.outcome.norm
    figures.fused_ratio = fused.outcome.norm / norm if norm else None
    figures.recomputed, figures.layout = fused.recomputed, fused.layout


def training_problems(case: Training, stock: Run, fused: Run) -> list[str]:
    """Say what is not equal in two trainings, see [`problems_of`]."""
    return _problems_of_run(case, stock, fused, update_errors(stock, fused))


def _problems_of_run(case: Training, stock: Run, fused: Run, errors: Errors) -> list[str]:
    problems = []
    if not _worst(errors) <= UPDATE_TOLERANCE:
        worst = errors.parameters.get(errors.worst_parameter or "", 0.0)
        problems.append(f"update off by {errors.gradient:.1e}, of {errors.worst_parameter} by {worst:.1e}")
    metrics = differing_entries(stock.log, fused.log)
    if metrics:
        problems.append(f"metrics differ: {', '.join(metrics)}")
    seen = first_difference(stock.seen, fused.seen)
    if seen is not None:
        problems.append(seen)
    expected = case.customised.forwards
    if expected is not None and not fused.forwards < stock.forwards:
        problems.append(f"{fused.forwards} forwards, as many as stock's")
    if expected == "grad-only" and fused.forwards_without_gradient:
        problems.append(f"{fused.forwards_without_gradient} forwards without gradient")
    return problems


def differing_entries(stock: list[dict[str, Any]], fused: list[dict[str, Any]]) -> list[str]:
    """
    Names of metrics that differ in an entry of the log: in value, or as only one side logs them.

    Args:
        stock (`list[dict]`):
            Stock's entries.
        fused (`list[dict]`):
            The fused trainer's.

    Returns:
        `list[str]`:
            `"name"`, `"name (missing)"` or `"name (extra)"`, sorted; `"entries"` when there are not as many.
    """
    differing = {"entries"} if len(stock) != len(fused) else set()
    for expected, entry in zip(stock, fused, strict=False):
        differing |= {f"{name} (missing)" for name in expected.keys() - entry.keys()}
        differing |= {f"{name} (extra)" for name in entry.keys() - expected.keys()}
        differing |= {name for name in expected.keys() & entry.keys() if not same(expected[name], entry[name])}
    return sorted(differing)


def same(a: Any, b: Any) -> bool:
    """Return `True` if two things that were logged or seen are the same, numbers up to rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return close(a, b)
    return type(a) is type(b) and a == b


def first_difference(stock: list[Any], fused: list[Any]) -> str | None:
    """The first thing that callbacks and hooks did not see as in stock's training, in words, or `None`."""
    for number, (expected, value) in enumerate(zip(stock, fused, strict=False)):
        if not same(expected, value):
            return f"saw {value} for {expected} (number {number} of {len(stock)})"
    return None if len(stock) == len(fused) else f"saw {len(fused)} things for {len(stock)}"
