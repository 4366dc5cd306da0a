"""
Tells rounding from differences, where a drawn case is out of tolerance. No tolerance is widened for a tie: stock runs
again with its weights and log-probs moved by their rounding, and one of these runs must give what the fused trainer
does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.judge import TOLERANCE, Result, differing_metrics, measure
from trl_fused_grpo.parity.tiny.batches import Data
from trl_fused_grpo.parity.trainers import Settings, load_weights

from .case import DrawnCase, Training
from .judge import LOSS_SCALE, problems_of, with_metrics_of_others
from .run_training import Pair, Run
from .steps import Outcome, run_steps, stock_trainer
from .training_errors import (
    UPDATE_TOLERANCE,
    differing_entries,
    first_difference,
    training_problems,
    update_errors,
)


MOVES = 16  # of stock; with k tokens on a bound, one in 2**k gives what the fused trainer does
# So many times more where only half of the tokens move: of three with one entropy at the quantile, one may have left it
_PARTIAL_MOVES = 16
_EPS = torch.finfo(torch.float32).eps
_LOGPS_NOISE = 4 * _EPS  # of a log-prob or an entropy, relative, and of smaller ones than 1 absolute
# A sum that cancels: the fused trainer's may be so many times as far from stock's as the moved ones, which are no jumps
_SPREAD, _JUMP = 3.0, 1e-3


@dataclass(frozen=True)
class Compared:
    """Weights before the first step by name, the data, and what came out of the stock and of the fused trainer."""

    start: dict[str, torch.Tensor]
    data: Data
    stock: Outcome
    fused: Outcome


def rounding_verdict(case: DrawnCase, settings: Settings, compared: Compared) -> Literal["tie", "rounding"] | None:
    """
    Why a difference in float32 is rounding.

    Args:
        case ([`DrawnCase`]):
            What ran.
        settings ([`Settings`]):
            Device and dtype.
        compared ([`Compared`]):
            What is out of tolerance.

    Returns:
        `str`, *optional*:
            `"tie"` when stock, moved by rounding, gives the same within the tolerance: a token lies on a clip bound or
            an entropy quantile, or two experts are equally good. `"rounding"` when a sum cancels: all that is out of
            tolerance is about as far from stock as stock moves by rounding, and that is little. `None` for a
            difference.
    """
    moved = list(_moved_outcomes(case, settings, compared, MOVES))
    if _is_within_spread(case, compared, moved):
        return "rounding"
    # Where a sum cancels too, moved weights would make a difference of their own
    has_quantile = case.config.get("top_entropy_quantile", 1.0) < 1.0
    alone = _moved_outcomes(case, settings, compared, MOVES if has_quantile else 0, share=0.5, entropies_alone=True)
    partly = _moved_outcomes(case, settings, compared, _PARTIAL_MOVES * MOVES, share=0.5)
    others = chain(moved, alone, partly)
    return (
        "tie"
        if any(not problems_of(case, outcome, compared.fused, Result(case.name, "")) for outcome in others)
        else None
    )


def training_verdict(case: Training, pair: Pair) -> Literal["tie", "rounding"] | None:
    """
    Why two trainings in float32 differ by rounding, see [`rounding_verdict`]: stock trains again with weights,
    log-probs and entropies moved by theirs. `None` for a difference.
    """
    generator, runs = torch.Generator().manual_seed(case.seed), []
    for _ in range(MOVES):
        start = _moved_weights(pair.trainings.start, generator)
        runs.append(pair.trainings.stock(start, lambda trainer: _move_logps(trainer, generator)))
        if all(not training_problems(case, runs[-1], fused) for fused in pair.fused.values()):
            return "tie"
    return "rounding" if all(_moves_as_far(pair.stock, fused, runs) for fused in pair.fused.values()) else None


def _moves_as_far(stock: Run, fused: Run, moved: list[Run]) -> bool:
    """Return `True` if nothing of a training is further from stock's than stock's is when it is moved."""
    errors = update_errors(stock, fused)
    spreads = [update_errors(stock, one) for one in moved]
    pairs = [(errors.gradient, max(spread.gradient for spread in spreads))]
    pairs += [(error, max(spread.parameters[name] for spread in spreads)) for name, error in errors.parameters.items()]
    logs = {name for one in moved for name in differing_entries(stock.log, one.log)}
    sees_other = [first_difference(stock.seen, one.seen) is not None for one in (fused, *moved)]
    return (
        _are_within_spread(pairs, UPDATE_TOLERANCE)
        and logs >= set(differing_entries(stock.log, fused.log))
        and (not sees_other[0] or any(sees_other[1:]))
    )


def _is_within_spread(case: DrawnCase, compared: Compared, moved: list[Outcome]) -> bool:
    stock = with_metrics_of_others(case, compared.stock, compared.fused)
    if differing_metrics(stock.metrics, compared.fused.metrics):
        return False
    error = measure([compared.stock], [compared.fused], LOSS_SCALE)
    spread = measure([compared.stock] * len(moved), moved, LOSS_SCALE)
    pairs = [
        (error.loss, spread.loss),
        *((error.parameters[name], spread.parameters[name]) for name in error.parameters),
    ]
    return _are_within_spread(pairs, TOLERANCE)


def _are_within_spread(pairs: list[tuple[float, float]], tolerance: float) -> bool:
    """Return `True` if each error is within the tolerance, or explained by how far rounding moves stock."""
    return all(error <= tolerance or error <= min(_SPREAD * spread, _JUMP) for error, spread in pairs)


def _moved_outcomes(
    case: DrawnCase,
    settings: Settings,
    compared: Compared,
    count: int,
    share: float = 1.0,
    entropies_alone: bool = False,
) -> Iterator[Outcome]:
    generator = torch.Generator().manual_seed(case.seed)
    for _ in range(count):
        moved = compared.start if entropies_alone else _moved_weights(compared.start, generator)
        trainer = load_weights(stock_trainer(case, settings), moved)
        _move_logps(trainer, generator, share, entropies_alone)
        yield run_steps(trainer, case, compared.data, settings.dtype)


def _moved_weights(weights: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: weight * (1 + _EPS * _noise(weight, generator)) for name, weight in weights.items()}


def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def _move_logps(
    trainer: Trainer, generator: torch.Generator, share: float = 1.0, entropies_alone: bool = False
) -> None:
    """
    Move a share of the log-probs and entropies, or of these alone, by rounding, also those of equal rows, which equal
    weights give equal bits.
    """
    compute = trainer._get_per_token_logps_and_entropies

    def moved(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        logps, entropies, *others = compute(*args, **kwargs)
        logps = logps if entropies_alone else _moved(logps, generator, share)
        return logps, _moved(entropies, generator, share), *others

    trainer._get_per_token_logps_and_entropies = moved


def _moved(values: torch.Tensor | None, generator: torch.Generator, share: float) -> torch.Tensor | None:
    if values is None:
        return None
    if share < 1.0:  # some by one step: of equal rows some come out equal again, as they do in one packed row
        noise = (torch.rand(values.shape, generator=generator) < share).to(values)
    else:
        noise = _noise(values, generator)
    return values + _LOGPS_NOISE * values.detach().abs().clamp(min=1.0) * noise
