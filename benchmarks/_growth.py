"""Tells a series that grows from one that varies: the slope of its means, and a bound of it."""

import math
import statistics
from typing import Any


BLOCKS = 20  # means over so many equal parts of the training: neighbouring steps are not independent
# Of 97.5%: so that the two-sided interval has 95%
STUDENT_T = {18: 2.101, 17: 2.110, 16: 2.120, 15: 2.131, 14: 2.145, 13: 2.160, 12: 2.179, 11: 2.201, 10: 2.228}
# The most that a series may grow in 1,000 steps, by the upper bound of its slope. Times vary on a machine that others
# use: their growth must be proved, by the lower bound
LIMITS = {
    "rss_mib": 12.0,
    "allocated_mib": 1.0,
    "reserved_mib": 20.0,
    "tensors": 5.0,
    "seconds": 0.1,  # of the mean
}
# What CUDA's allocator takes at once for large tensors, and for small ones: one more of each is no growth
SEGMENTS_MIB = 20.0 + 2.0
COURSE = 8  # means of as many equal parts, for whoever wants to know whether a series comes to rest
EXACT = ("graphs", "caches")  # do not grow at all
# Not judged: each log entry adds some objects, stock's as well; each batch has its own peak; lengths that are multiples
# of 16 have kernels of their own
TOLD = ("objects", "peak_mib", "kernels")


def judged(samples: list[dict[str, float]], warm_up: int) -> dict[str, Any]:
    """
    For each series its first and last value, and its growth in 1,000 steps with a bound.

    Args:
        samples (`list[dict]`): each with its `step`, and a value of every series.
        warm_up (`int`): steps that do not count.

    Returns:
        `dict[str, Any]`: the figures, `problems` in words, and under `right` whether there is none.
    """
    samples = [sample for sample in samples if sample["step"] > warm_up]
    result: dict[str, Any] = {"warm_up": warm_up, "samples": len(samples)}
    problems = []
    for name in [*LIMITS, *EXACT, *TOLD]:
        if name not in samples[0]:
            continue
        values = [sample[name] for sample in samples]
        result[name] = {"first": _short(values[0]), "last": _short(values[-1])}
        if name in EXACT:
            if values[-1] > values[0]:
                problems.append(f"{name} grew from {values[0]:g} to {values[-1]:g}")
            continue
        slope, bound = slope_of([sample["step"] for sample in samples], values)
        growth = {"per_1000_steps": _short(1000 * slope), "bound": _short(1000 * bound)}
        result[name] |= {**growth, "course": [_short(mean) for mean in _means(values, COURSE)]}
        unit = statistics.fmean(values) if name == "seconds" else 1.0
        worst = slope - bound if name == "seconds" else slope + bound
        is_one_segment = name == "reserved_mib" and _kept(values) <= SEGMENTS_MIB
        if name in LIMITS and 1000 * worst / unit > LIMITS[name] and not is_one_segment:
            problems.append(f"{name} grows by {growth['per_1000_steps']} in 1,000 steps, to within {growth['bound']}")
    return {**result, "problems": problems, "right": not problems}


def _kept(values: list[float]) -> float:
    """How far the least of the last quarter is above the least of the first: what comes and goes is not kept."""
    quarter = max(1, len(values) // 4)
    return min(values[-quarter:]) - min(values[:quarter])


def slope_of(steps: list[float], values: list[float]) -> tuple[float, float]:
    """Least-squares slope of the means of equal parts of a series, and half the width of its 95% interval."""
    x, y = _means(steps, BLOCKS), _means(values, BLOCKS)
    count = len(x)
    if count < 4:
        return 0.0, 0.0
    slope, intercept = statistics.linear_regression(x, y)
    residuals = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    error = math.sqrt(residuals / (count - 2) / spread)
    return slope, STUDENT_T.get(count - 2, 2.8) * error


def _means(values: list[float], parts: int) -> list[float]:
    """Of so many equal parts of a series, or of its values where it has fewer."""
    count = min(parts, len(values))
    return [statistics.fmean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
