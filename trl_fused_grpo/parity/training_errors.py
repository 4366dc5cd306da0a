"""What differs between two trainings: weights, logs, what callbacks and hooks saw."""

import math
from typing import Any, Protocol

from .case import Case
from .errors import Errors, close, measure
from .training import Pair, Run


UPDATE_TOLERANCE = 1e-5  # float32: the change of all weights and of each, relative to stock's


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
    Compare ours with stock's, at every `fused_pass_tokens` that was tried.

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
    for tokens, ours in pair.ours.items():
        errors = measure([pair.stock.outcome], [ours.outcome])
        update = _not_nan(max(errors.gradient, errors.parameters.get(errors.worst_parameter or "", 0.0)))
        if update > worst:
            worst = update
            _fill(figures, pair.stock, ours, errors)
        where = "" if tokens is None else f" (fused_pass_tokens={tokens})"
        found = _problems_of_run(case, pair.stock, ours, errors, update)
        problems += [problem + where for problem in found if problem not in problems]
    return problems


def _not_nan(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _fill(figures: Figures, theirs: Run, ours: Run, errors: Errors) -> None:
    figures.loss, figures.loss_error = theirs.outcome.loss, errors.loss
    figures.worst_parameter = errors.worst_parameter
    figures.gradient_error = errors.parameters.get(errors.worst_parameter or "", errors.gradient)
    norm = theirs.outcome.norm
    figures.ours_ratio = ours.outcome.norm / norm if norm else None
    figures.recomputed, figures.layout = ours.recomputed, ours.layout


def _problems_of_run(case: Case, theirs: Run, ours: Run, errors: Errors, update: float) -> list[str]:
    problems = []
    if not update <= UPDATE_TOLERANCE:
        problems.append(f"update off by {errors.gradient:.1e}, of {errors.worst_parameter} by {update:.1e}")
    metrics = differing_entries(theirs.log, ours.log)
    if metrics:
        problems.append(f"metrics differ: {', '.join(metrics)}")
    seen = first_difference(theirs.seen, ours.seen)
    if seen is not None:
        problems.append(seen)
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
