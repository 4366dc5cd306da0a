"""
Measures how far the outcomes of two trainers are apart, and says which errors are too large: in float32 against stock,
in bfloat16, and where float32's rounding grows, beside stock's own error against float64.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .case import Case
from .run_case import Outcome


TOLERANCE = 1e-5  # float32: loss and every gradient, relative to stock
# bfloat16: both trainers round differently. Which of them is closer to float64 is chance, so that a limit of exactly
# stock's error would fail every other case. Several batches are pooled, and the limits leave room for chance: 10% over
# all gradients, 25% for one parameter, each plus TOLERANCE. The loss is one number a batch: the ratio of two root mean
# squares of four exceeds 2 in one case of ten. LOSS_FLOOR is half a unit in the last place of a bfloat16 number.
BFLOAT16_BATCHES = 4
# The weight of a whole sequence is an exponential of a sum over its tokens. All gradients of the sequence share its
# rounding error, so that a batch has 6 independent errors instead of about 50: hence eight times as many batches. In
# float32 stock is up to 1.5e-5 from float64 then, so that beyond TOLERANCE against stock float64 decides here too.
SEQUENCE_WEIGHT_BATCHES = 32
# Of many cases some exceed a limit by chance. Such a case is judged over so many times as many batches: chance shrinks
# with them, a fault does not
AGAIN = 4
SLACK, PARAMETER_SLACK, LOSS_SLACK = 1.1, 1.25, 2.0
LOSS_FLOOR = torch.finfo(torch.bfloat16).eps / 2
NO_ROW = "no row went through the fused function"
METRIC_TOLERANCE, METRIC_FLOOR = 1e-4, 1e-6  # relative, absolute


@dataclass
class Result:
    """
    Outcome of one case.

    Attributes:
        name (`str`): the case's name.
        description (`str`): what the case compares.
        verdict (`str`): `"equal"`, `"different"`, `"failed"` (an exception) or `"skipped"` (does not apply here).
        reason (`str`): why it is not equal.
        loss (`float`, *optional*): stock's loss, summed over micro-batches.
        loss_error (`float`, *optional*): relative error of the fused trainer's loss: against stock's in float32,
            against float64 in bfloat16.
        gradient_error (`float`, *optional*): relative error of the worst parameter's gradient against the same
            reference. In bfloat16 the worst parameter is the one whose error is largest relative to stock's.
        worst_parameter (`str`, *optional*): the parameter it belongs to.
        stock_loss_error, stock_gradient_error (`float`, *optional*): stock's errors against float64 for the same loss
            and parameter, bfloat16 only.
        metrics_differ (`list[str]`): logged metrics whose names or, in float32, values differ.
        fused_ratio (`float`, *optional*): the fused trainer's gradient norm over stock's.
        liger_ratio (`float`, *optional*): stock Liger's gradient norm over stock's.
        liger_error (`float`, *optional*): the distance of stock Liger's gradients from stock's, relative to their norm.
        liger (`str`): why there is no `liger_ratio` though TRL has a Liger loss: `"refuses"`, `"fails"`, or empty.
        recomputed (`float`, *optional*): fraction of rows that backward had to compute again.
        layout (`str`, *optional*): how the fused trainer laid the rows out: `"packed"` or `"padded"`.
        seconds (`float`): time the case took.
    """

    name: str
    description: str
    verdict: str = "failed"
    reason: str = ""
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    stock_loss_error: float | None = None
    stock_gradient_error: float | None = None
    metrics_differ: list[str] = field(default_factory=list)
    fused_ratio: float | None = None
    liger_ratio: float | None = None
    liger_error: float | None = None
    liger: str = ""
    recomputed: float | None = None
    layout: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Errors:
    """Relative errors of one trainer against a reference, root mean square over the batches compared."""

    loss: float
    gradient: float  # of all parameters together
    parameters: dict[str, float]  # of the gradient of each, by name

    @property
    def worst_parameter(self) -> str | None:
        """The name of the parameter with the largest error."""
        return largest(self.parameters)


def largest(values: Mapping[str, float]) -> str | None:
    """Return the name of the largest value; NaN counts as the largest."""
    return max(values, key=lambda name: math.inf if math.isnan(values[name]) else values[name], default=None)


def measure(references: Sequence[Outcome], outcomes: Sequence[Outcome], loss_scale: float = 0.0) -> Errors:
    """
    Compare outcomes with their references, batch by batch.

    Args:
        references (`Sequence[Outcome]`): what counts as right.
        outcomes (`Sequence[Outcome]`): as many, in the same order.
        loss_scale (`float`): a smaller loss is replaced by it as the divisor.

    Returns:
        [`Errors`]:
            A reference gradient that is smaller than float32's resolution of all gradients together is replaced by that
            resolution as the divisor. Where the divisor is zero, any difference is an infinite error.
    """
    sizes = {name: _root(_square(r.tensors[name]) for r in references) for name in references[0].tensors}
    distances = {name: _root(squared_distances(references, outcomes, name)) for name in sizes}
    whole = _root(size**2 for size in sizes.values())
    floor = torch.finfo(torch.float32).eps * whole
    loss = _root(r.loss**2 for r in references)
    loss_distance = _root((o.loss - r.loss) ** 2 for r, o in zip(references, outcomes, strict=True))
    return Errors(
        loss=_relative(loss_distance, max(loss, loss_scale)),
        gradient=_relative(_root(distance**2 for distance in distances.values()), whole),
        parameters={name: _relative(distances[name], max(sizes[name], floor)) for name in sizes},
    )


def squared_distances(references: Sequence[Outcome], outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Return the squared distance of a parameter's gradient from its reference in each batch."""
    return [
        _square(o.tensors[name].double() - r.tensors[name].double()) for r, o in zip(references, outcomes, strict=True)
    ]


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _root(squares: Iterable[float]) -> float:
    return math.fsum(squares) ** 0.5


def _relative(distance: float, size: float) -> float:
    return distance / size if size else math.inf if distance else 0.0


def differing_metrics(stock: dict[str, list[float]], fused: dict[str, list[float]], values: bool = True) -> list[str]:
    """
    Names of metrics that one side lacks or that differ in value.

    Args:
        stock (`dict[str, list[float]]`): stock's, by name.
        fused (`dict[str, list[float]]`): the fused trainer's.
        values (`bool`): whether to compare values too: tolerance 1e-4 relative, 1e-6 absolute; NaN equals NaN.

    Returns:
        `list[str]`:
            Sorted; `"name (missing)"` and `"name (extra)"` where only one side logs it.
    """
    differing = [f"{name} (missing)" for name in stock.keys() - fused.keys()]
    differing += [f"{name} (extra)" for name in fused.keys() - stock.keys()]
    for name in stock.keys() & fused.keys():
        same_count = len(stock[name]) == len(fused[name])
        if not same_count or (values and not all(map(close, stock[name], fused[name]))):
            differing.append(name)
    return sorted(differing)


def close(a: float, b: float) -> bool:
    """Return `True` if two values of a metric are equal up to rounding; NaN equals NaN."""
    both_nan = math.isnan(a) and math.isnan(b)
    return both_nan or math.isclose(a, b, rel_tol=METRIC_TOLERANCE, abs_tol=METRIC_FLOOR)


def float32_problems(stock: Outcome, fused: Outcome, result: Result, loss_scale: float = 0.0) -> list[str]:
    """Fill in the fused trainer's errors against stock, see [`measure`], and say which are too large."""
    errors = measure([stock], [fused], loss_scale)
    result.loss_error, result.worst_parameter = errors.loss, errors.worst_parameter
    result.gradient_error = errors.parameters.get(result.worst_parameter or "")
    problems = []
    if not errors.loss <= TOLERANCE:
        problems.append(f"loss off by {errors.loss:.1e}")
    if not (result.gradient_error or 0.0) <= TOLERANCE:
        problems.append(f"gradient of {result.worst_parameter} off by {result.gradient_error:.1e}")
    result.metrics_differ = differing_metrics(stock.metrics, fused.metrics)
    return problems + metric_problems(result)


def may_be_rounding(problems: list[str], case: Case) -> bool:
    """Return `True` if only loss and gradients differ in float32, in a case that multiplies their rounding errors."""
    are_numbers = all(problem.startswith(("loss off", "gradient of")) for problem in problems)
    return bool(problems) and are_numbers and has_sequence_weights(case)


def problems_beside_float64(
    errors: Errors, stock_errors: Errors, result: Result, loss_floor: float = LOSS_FLOOR
) -> list[str]:
    """Fill in the fused trainer's errors beside stock's, both against float64, and say which are too large."""
    result.loss_error, result.stock_loss_error = errors.loss, stock_errors.loss
    tolerances = {name: error + TOLERANCE for name, error in stock_errors.parameters.items()}
    result.worst_parameter = largest({name: error / tolerances[name] for name, error in errors.parameters.items()})
    result.gradient_error = errors.parameters.get(result.worst_parameter or "")
    result.stock_gradient_error = stock_errors.parameters.get(result.worst_parameter or "")
    problems = []
    if exceeds(errors.loss, stock_errors.loss, LOSS_SLACK, loss_floor):
        problems.append(f"loss {errors.loss:.1e} from float64, stock {stock_errors.loss:.1e}")
    if exceeds(errors.gradient, stock_errors.gradient, SLACK):
        problems.append(f"gradients {errors.gradient:.1e} from float64, stock {stock_errors.gradient:.1e}")
    if exceeds(result.gradient_error or 0.0, result.stock_gradient_error or 0.0, PARAMETER_SLACK):
        problems.append(
            f"gradient of {result.worst_parameter} {result.gradient_error:.1e} from float64, "
            f"stock {result.stock_gradient_error:.1e}"
        )
    return problems


def exceeds(error: float, stock_error: float, slack: float, floor: float = TOLERANCE) -> bool:
    """Return `True` if an error in bfloat16 is more than `slack` times stock's plus `floor`; NaN is."""
    return not error <= slack * stock_error + floor


def bfloat16_batches(case: Case) -> int:
    """Return how many batches are pooled: more where all tokens of a sequence share one weight and its error."""
    return SEQUENCE_WEIGHT_BATCHES if has_sequence_weights(case) else BFLOAT16_BATCHES


def has_sequence_weights(case: Case) -> bool:
    """Return `True` if all tokens of a sequence share one weight, which is not one."""
    is_given = getattr(case.data, "old", None) or getattr(case.data, "sampling", None)
    of_sequences = (
        case.config.get("loss_type") == "vespo"
        or case.config.get("importance_sampling_level") == "sequence"
        or case.config.get("vllm_importance_sampling_mode", "").startswith("sequence")
    )
    return bool(is_given and of_sequences)


def bfloat16_rounds(case: Case) -> list[int]:
    """Return over how many batches a case is judged: the first, and where it exceeds a limit the next ones."""
    return [bfloat16_batches(case), AGAIN * bfloat16_batches(case)]


def metric_problems(result: Result) -> list[str]:
    """Say which metrics differ."""
    return [f"metrics differ: {', '.join(result.metrics_differ)}"] if result.metrics_differ else []


def row_problems(case: Case, fused: Outcome, result: Result) -> list[str]:
    """Say if no row went through the fused function, or if rows were recomputed where the forecast is right."""
    if case.mode == "train" and not fused.rows:
        return [NO_ROW]
    if case.recomputed == "none" and result.recomputed:
        return [f"{result.recomputed:.1%} of rows recomputed, none expected"]
    if case.recomputed == "some" and not result.recomputed:
        return ["no row recomputed although the forecast was wrong"]
    return []
