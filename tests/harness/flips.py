"""
Tells batches in which a bound decides by rounding, where a drawn case exceeds a limit in bfloat16. A token or a whole
sequence that lies near a clip bound or a mask's is on one side of it in float64 and, by rounding, on the other in
bfloat16, for stock as for the fused trainer: such a batch has many times the error of the others. No limit is widened:
these batches are set aside, the others must be within all limits, and the fused trainer may not have more of them.

At the entropy quantile and at the bounds of vLLM's ratio a large part of the batches may have such a token, and it is
known which: what TRL selects there is noted.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from trl_fused_grpo.parity.judge import BFLOAT16_BATCHES, Errors, Result, measure, problems_beside_float64

from .steps import Outcome


FLIP = 3.0  # times the median of stock's errors; batches without one reach about twice
MOST_FLIPS = 0.25  # of all batches: with more of them the median says nothing. Known ones are not asked for it
MOST_SIGMAS = 2.0  # by which the fused trainer may have more of them than stock, as two counts by chance


def flip_verdict(
    references: Sequence[Outcome], stock: Sequence[Outcome], fused: Sequence[Outcome]
) -> Literal["tie"] | None:
    """
    Why a case exceeds a limit in bfloat16.

    Args:
        references (`Sequence[Outcome]`):
            In float64, one a batch.
        stock, fused (`Sequence[Outcome]`):
            Of the same batches, in the same order.

    Returns:
        `str`, *optional*:
            `"tie"` when it does not exceed one without the batches in which a bound decides by rounding, and the fused
            trainer has no more of these than chance gives it. `None` otherwise.
    """
    of_stock, of_fused = (
        [measure([reference], [outcome]) for reference, outcome in zip(references, outcomes, strict=True)]
        for outcomes in (stock, fused)
    )
    if not all(math.isfinite(errors.gradient) for errors in of_fused):
        return None
    by_stock, by_fused = (
        {i for i, outcome in enumerate(outcomes) if _selects_others(references[i], outcome)}
        for outcomes in (stock, fused)
    )
    batches = set(range(len(references))) - by_stock - by_fused
    if len(batches) < BFLOAT16_BATCHES:
        return None
    least = (1 - MOST_FLIPS) * len(batches)
    while batches:
        chosen = sorted(batches)
        result = Result("", "")
        errors, stock_errors = (
            measure([references[i] for i in chosen], [outcomes[i] for i in chosen]) for outcomes in (fused, stock)
        )
        if not problems_beside_float64(errors, stock_errors, result):
            break
        for name in (None, result.worst_parameter):
            limit = FLIP * statistics.median(_error(of_stock[i], name) for i in chosen)
            by_stock |= {i for i in chosen if _error(of_stock[i], name) > limit}
            by_fused |= {i for i in chosen if _error(of_fused[i], name) > limit}
        if not (by_stock | by_fused) & batches:
            return None
        batches -= by_stock | by_fused
    flips, surplus = by_stock | by_fused, len(by_fused) - len(by_stock)
    is_chance = surplus <= MOST_SIGMAS * (len(by_fused) + len(by_stock)) ** 0.5
    return "tie" if flips and len(batches) >= least and is_chance else None


def _selects_others(reference: Outcome, outcome: Outcome) -> bool:
    """
    Return `True` if the entropy quantile selects other tokens than in float64, or vLLM's bounds mask others. It is not
    known where a trainer asks for the quantile more often, as with `fused_verify`, or leaves sequences out: it does not
    compute their ratios.
    """
    selections = [(reference.high_entropy, outcome.high_entropy)]
    if not outcome.leaves_out:
        selections.append((reference.masked, outcome.masked))
    return any(len(mine) == len(theirs) and not all(map(torch.equal, mine, theirs)) for mine, theirs in selections)


def _error(errors: Errors, name: str | None) -> float:
    """Of a parameter's gradient, or without a name of all gradients together."""
    return errors.gradient if name is None else errors.parameters[name]
