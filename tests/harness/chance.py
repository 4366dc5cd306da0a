"""
Tells chance from a difference where a drawn case exceeds a limit in bfloat16 over its last batches. The limits are on
the error of all batches together, in which a few with large gradients may have nearly all of it: with some thousand
cases some exceed one though neither trainer is the more exact. No limit is widened: batch by batch the fused trainer
must be within it, beyond doubt, and what it has more in all together must be what chance gives.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from trl_fused_grpo.parity.judge import (
    LOSS_FLOOR,
    LOSS_SLACK,
    PARAMETER_SLACK,
    SLACK,
    exceeds,
    measure,
    squared_distances,
)
from trl_fused_grpo.parity.run_case import Outcome


EXCHANGES = 4000  # of the two trainers, in batches drawn at random
LEAST_LIKELY = 0.05  # chance may give so much more error, or even more than that, in so many of these exchanges
SIGMAS = 2.0  # of the mean over batches, by which it must be within a limit
# The largest excess of a batch may be so many times stock's largest over the fused trainer: a fault of few batches,
# which chance could have put into one trainer as well as into the other, has no such size
LARGEST = 3.0


def chance_verdict(
    references: Sequence[Outcome], stock: Sequence[Outcome], fused: Sequence[Outcome]
) -> Literal["rounding"] | None:
    """
    Why a case exceeds a limit in bfloat16.

    Args:
        references (`Sequence[Outcome]`):
            In float64, one a batch.
        stock, fused (`Sequence[Outcome]`):
            Of the same batches, in the same order.

    Returns:
        `str`, *optional*:
            `"rounding"` when for all that exceeds a limit three things hold: the geometric mean over batches of the
            fused trainer's error relative to stock's is below the limit by two standard errors; the two trainers,
            exchanged in each batch at random, give at least this excess in 5% of 4,000 draws; and no batch is worse for
            the fused trainer than three times what the worst is for stock. `None` otherwise.
    """
    errors, stock_errors = measure(references, fused), measure(references, stock)

    judged = [
        _is_chance(
            squared_distances(references, fused, name), squared_distances(references, stock, name), PARAMETER_SLACK
        )
        for name, error in errors.parameters.items()
        if exceeds(error, stock_errors.parameters[name], PARAMETER_SLACK)
    ]
    if exceeds(errors.gradient, stock_errors.gradient, SLACK):
        of_fused, of_stock = (_of_all_gradients(references, outcomes) for outcomes in (fused, stock))
        judged.append(_is_chance(of_fused, of_stock, SLACK))
    if exceeds(errors.loss, stock_errors.loss, LOSS_SLACK, LOSS_FLOOR):
        of_fused, of_stock = (
            [(outcome.loss - reference.loss) ** 2 for reference, outcome in zip(references, outcomes, strict=True)]
            for outcomes in (fused, stock)
        )
        judged.append(_is_chance(of_fused, of_stock, LOSS_SLACK))
    return "rounding" if judged and all(judged) else None


def _of_all_gradients(references: Sequence[Outcome], outcomes: Sequence[Outcome]) -> list[float]:
    of_each = [squared_distances(references, outcomes, name) for name in references[0].tensors]
    return [math.fsum(of_batch) for of_batch in zip(*of_each, strict=True)]


def _is_chance(fused: list[float], stock: list[float], limit: float) -> bool:
    pairs = [(mine, theirs) for mine, theirs in zip(fused, stock, strict=True) if mine or theirs]
    if len(pairs) < 2 or not all(0.0 < value < math.inf for pair in pairs for value in pair):
        return False
    ratios = [math.log(mine / theirs) / 2 for mine, theirs in pairs]
    mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    if mean + SIGMAS * error > math.log(limit) or max(ratios) > max(0.0, -min(ratios)) + math.log(LARGEST):
        return False
    squares = torch.tensor(pairs, dtype=torch.float64)  # [batches, 2]
    generator = torch.Generator().manual_seed(0)
    of_fused = torch.randint(2, (EXCHANGES, len(pairs)), generator=generator).double()  # which batches stay as they are
    totals = squares.sum()
    exchanged = of_fused @ squares[:, 0] + (1 - of_fused) @ squares[:, 1]  # [EXCHANGES], the other has the rest
    share = (exchanged / (totals - exchanged) >= squares[:, 0].sum() / squares[:, 1].sum()).double().mean()
    return float(share) >= LEAST_LIKELY
