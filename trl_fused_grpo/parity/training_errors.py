"""What differs between two trainings: weights, logs, what callbacks and hooks saw."""

import math
from typing import Any, Protocol

from .case import Case, SkippedError
from .errors import Errors, close, measure
from .training import Pair, Run


# float32: the change of all weights and of each, relative to stock's, beside the rounding of the weights themselves
UPDATE_TOLERANCE = 1e-5


class Figures(Protocol):
    """The fields of a [`Result`] that a training fills in."""

    loss: float | None
    loss_error: float | None
    gradient_error: float | None
    worst_parameter: str | None
    metrics_differ: list[str]
    ours_ratio: float | None
    recomputed: float | None
    layout: str | None


def problems_of(case: Case, pair: Pair, figures: Figures) -> list[str]:
    """
    Compare ours with stock's, at every `fused_max_tokens_per_forward` that was tried.

    Args:
        case ([`Case`]):
            What was run.
        pair ([`Pair`]):
            The trainings.
        figures ([`Result`]):
            Gets the figures of the run that is furthest off.

    Returns:
        `list[str]`:
            What is not equal, the same thing once.
    """
    problems: list[str] = []
    worst = -1.0
    rests = case.customised is not None and case.customised.rests
    if rests and _moves(pair.stock) and not any(map(_moves, pair.ours.values())):
        raise SkippedError("stock moves here by rounding alone, ours does not")
    for tokens, ours in pair.ours.items():
        errors = update_errors(pair.stock, ours)
        if _worst(errors) > worst:
            worst = _worst(errors)
            _fill(figures, pair.stock, ours, errors)
        where = "" if tokens is None else f" (fused_max_tokens_per_forward={tokens})"
        found = _problems_of_run(case, pair.stock, ours, errors)
        problems += [problem + where for problem in found if problem not in problems]
    return problems


def _moves(run: Run) -> bool:
    return any(bool(change.any()) for change in run.change.values())


def update_errors(theirs: Run, ours: Run) -> Errors:
    """
    Errors of the change of weights, less what float32 loses when it rounds a weight after each step.

    Where stock moves a weight by exactly nothing, any move is an infinite error.
    """
    errors = measure([theirs.outcome], [ours.outcome])
    sizes = {name: float(change.double().norm()) for name, change in theirs.change.items()}
    parameters = {
        name: max(error - theirs.rounding[name] / sizes[name], 0.0) if sizes[name] else error
        for name, error in errors.parameters.items()
    }
    return Errors(errors.loss, errors.gradient, parameters)


def _worst(errors: Errors) -> float:
    error = max(errors.gradient, errors.parameters.get(errors.worst_parameter or "", 0.0))
    return math.inf if math.isnan(error) else error


def _fill(figures: Figures, theirs: Run, ours: Run, errors: Errors) -> None:
    figures.loss, figures.loss_error = theirs.outcome.loss, errors.loss
    figures.worst_parameter = errors.worst_parameter
    figures.gradient_error = errors.parameters.get(errors.worst_parameter or "", errors.gradient)
    norm = theirs.outcome.norm
    figures.ours_ratio = ours.outcome.norm / norm if norm else None
    figures.recomputed, figures.layout = ours.recomputed, ours.layout


def _problems_of_run(case: Case, theirs: Run, ours: Run, errors: Errors) -> list[str]:
    problems = []
    if not _worst(errors) <= UPDATE_TOLERANCE:
        worst = errors.parameters.get(errors.worst_parameter or "", 0.0)
        problems.append(f"update off by {errors.gradient:.1e}, of {errors.worst_parameter} by {worst:.1e}")
    metrics = differing_entries(theirs.log, ours.log)
    if metrics:
        problems.append(f"metrics differ: {', '.join(metrics)}")
    seen = first_difference(theirs.seen, ours.seen)
    if seen is not None:
        problems.append(seen)
    expected = None if case.customised is None else case.customised.forwards
    if expected is not None and not ours.forwards < theirs.forwards:
        problems.append(f"{ours.forwards} forwards, as many as stock's")
    if expected == "once" and ours.forwards_without_gradient:
        problems.append(f"{ours.forwards_without_gradient} forwards without gradient")
    return problems


def differing_entries(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """
    Names of metrics that differ in an entry of the log: in value, or as only one side logs them.

    Args:
        theirs (`list[dict]`):
            Stock's entries.
        ours (`list[dict]`):
            The fused trainer's.

    Returns:
        `list[str]`:
            `"name"`, `"name (missing)"` or `"name (extra)"`, sorted; `"entries"` when there are not as many.
    """
    found = {"entries"} if len(theirs) != len(ours) else set()
    for expected, entry in zip(theirs, ours, strict=False):
        found |= {f"{name} (missing)" for name in expected.keys() - entry.keys()}
        found |= {f"{name} (extra)" for name in entry.keys() - expected.keys()}
        found |= {name for name in expected.keys() & entry.keys() if not same(expected[name], entry[name])}
    return sorted(found)


def same(a: Any, b: Any) -> bool:
    """Whether two things that were logged or seen are the same; numbers but for rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return close(a, b)
    return type(a) is type(b) and a == b


def first_difference(theirs: list[Any], ours: list[Any]) -> str | None:
    """What callbacks and hooks saw first that was not what they saw in stock's training."""
    for number, (expected, value) in enumerate(zip(theirs, ours, strict=False)):
        if not same(expected, value):
            return f"saw {value} for {expected} (number {number} of {len(theirs)})"
    return None if len(theirs) == len(ours) else f"saw {len(ours)} things for {len(theirs)}"
