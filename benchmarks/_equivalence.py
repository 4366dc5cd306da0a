"""Statistics of paired seeds: Student's t, an equivalence test, and intervals of means."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """
    Paired differences of two arms, one a seed.

    Attributes:
        mean, sd (`float`): of the differences.
        low, high (`float`): the interval of the mean at `1 - 2 * alpha`. Equivalent is what lies within the margin.
        p (`float`): of the equivalence test, the larger of its two one-sided ones.
        equivalent (`bool`): whether `p < alpha`.
    """

    mean: float
    sd: float
    low: float
    high: float
    p: float
    equivalent: bool


def equivalence(differences: Sequence[float], margin: float, alpha: float = 0.05) -> Paired:
    """
    Two one-sided paired t tests: is the mean difference above `-margin`, and is it below `margin`?

    Args:
        differences (`Sequence[float]`): at least two.
        margin (`float`): the largest mean difference that counts as none.
        alpha (`float`): the chance that arms further apart than the margin are called equivalent.
    """
    count = len(differences)
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    error = sd / math.sqrt(count)
    reach = t_quantile(1 - alpha, count - 1) * error
    if error == 0:
        p = 0.0 if abs(mean) < margin else 1.0
    else:
        p = max(t_tail((mean + margin) / error, count - 1), t_tail((margin - mean) / error, count - 1))
    return Paired(mean, sd, mean - reach, mean + reach, p, p < alpha)


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean of at least two values, and its two-sided interval."""
    mean = statistics.fmean(values)
    reach = t_quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


def t_tail(t: float, df: int) -> float:
    """Probability that Student's t with `df` degrees of freedom is larger than `t`."""
    half = 0.5 * _regularised_beta(df / (df + t * t), df / 2, 0.5)
    return half if t > 0 else 1 - half


def t_quantile(p: float, df: int) -> float:
    """The value below which Student's t with `df` degrees of freedom lies with probability `p`."""
    low, high = -1e4, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_tail(middle, df) < p else (low, middle)
    return (low + high) / 2


def _regularised_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _regularised_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    tiny = 1e-300
    c, d = 1.0, 0.0
    fraction = 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / ((1 + term * d) or tiny)
        c = (1 + term / c) or tiny
        fraction *= c * d
        if i and abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1)
