"""Measures how far the outcomes of two trainers are apart: loss, gradients, metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .run_case import Outcome


METRIC_TOLERANCE, METRIC_FLOOR = 1e-4, 1e-6  # relative, absolute


@dataclass(frozen=True)
class Errors:
    """
    Relative errors of one trainer against a reference, root mean square over the batches compared.

    Attributes:
        loss (`float`): of the loss.
        gradient (`float`): of all gradients together.
        parameters (`dict[str, float]`): of every parameter's gradient.
    """

    loss: float
    gradient: float
    parameters: dict[str, float]

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
