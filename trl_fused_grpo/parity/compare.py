"""Runs one case on the stock trainer, the fused one and stock Liger: errors, differing metrics, verdict."""

import math
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import trl
from packaging.version import Version

from .case import Case, SkippedError
from .errors import MEANS_OVER_MICRO_BATCHES, Errors, differing_metrics, measure
from .result import Result
from .run_case import Data, Outcome, make_data, run_case, stock_may_fail
from .run_training import run_both
from .trainers import (
    RefusedError,
    Settings,
    float64_trainer,
    fused_trainer,
    has_liger_loss,
    initial_weights,
    load_weights,
    noisy_weights,
    stock_liger_trainer,
    stock_trainer,
)
from .training_errors import problems_of


TOLERANCE = 1e-5  # float32: loss and every gradient, relative to stock
# Of a drawn case: a smaller loss is a mean whose terms cancel. They move with log-probs of about -10, where float32 has
# steps of 1e-6, so that such a loss may differ by TOLERANCE * LOSS_SCALE = 1e-6
LOSS_SCALE = 0.1
# A token can lie on a clip bound or an entropy quantile, up to rounding; so can the choice between two experts. Then
# the weights of stock are moved by their rounding, so many times
MOVES = 16
# Options that the fused trainer refuses where they cannot be had
REFUSABLE = {"fused_layout", "fused_backward"}

# bfloat16: both trainers round differently. Which of them is closer to float64 is chance, so that a limit of exactly
# stock's error would fail every other case. Several batches are pooled, and the limits leave room for chance: 10% over
# all gradients, 25% for one parameter, each plus TOLERANCE. The loss is one number a batch: the ratio of two root mean
# squares of four exceeds 2 in one case of ten. LOSS_FLOOR is half a unit in the last place of a bfloat16 number.
BFLOAT16_BATCHES = 4
# The weight of a whole sequence is an exponential of a sum over its tokens. All gradients of the sequence share its
# rounding error, so that a batch has 6 independent errors instead of about 50. Groups of four of VESPO's batches had
# 0.71 to 1.20 times stock's error (16 groups, median 1.02, all 64 batches together 0.90), hence eight times as many.
SEQUENCE_WEIGHT_BATCHES = 32
SLACK, PARAMETER_SLACK, LOSS_SLACK = 1.1, 1.25, 2.0
LOSS_FLOOR = torch.finfo(torch.bfloat16).eps / 2


class TieError(Exception):
    """The result differs from stock's, and rounding alone makes stock's differ so: the message names the difference."""


def compare(case: Case, settings: Settings) -> Result:
    """
    Run one case on every trainer.

    Args:
        case ([`Case`]):
            What to run.
        settings ([`Settings`]):
            Device and dtype.

    Returns:
        [`Result`]:
            Also when a trainer raises: the verdict is then `"failed"` and the reason names the exception.
    """
    result = Result(case.name, case.description)
    start = time.perf_counter()
    try:
        if case.min_trl is not None and Version(trl.__version__) < Version(case.min_trl):
            raise SkippedError(f"needs TRL {case.min_trl}")
        if settings.dtype == torch.bfloat16 and not case.compare_bf16:
            raise SkippedError("in bfloat16, rounding decides the routing of experts")
        if settings.dtype == torch.bfloat16 and case.customised is not None:
            raise SkippedError("trainings are compared in float32")
        runner = _compare_bfloat16 if settings.dtype == torch.bfloat16 else _compare_float32
        runner = _compare_training if case.customised is not None else runner
        problems = runner(case, settings, result)
        result.verdict, result.reason = "different" if problems else "equal", "; ".join(problems)
    except SkippedError as missing:
        result.verdict, result.reason = "skipped", str(missing)
    except TieError as tie:
        result.verdict, result.reason = "tie", str(tie)
    except Exception as error:  # one broken case must not hide the others
        result.reason = _describe(error)
    result.seconds = time.perf_counter() - start
    return result


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def _compare_training(case: Case, settings: Settings, result: Result) -> list[str]:
    return problems_of(case, run_both(case, settings), result)


def _compare_float32(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        data = make_data(case, load_weights(trainer, start), case.seed)
        stock = run_case(trainer, case, data, settings.dtype)
    fused = _run_fused(case, settings, start, data)
    _fill(result, case, stock, fused)
    _compare_liger(case, settings, start, data, stock, result)
    problems = _float32_problems(case, stock, fused, result)
    if problems and case.drawn and _stock_gives_it_too(case, settings, start, data, fused):
        raise TieError("; ".join(problems))
    return problems


def _float32_problems(case: Case, stock: Outcome, fused: Outcome, result: Result) -> list[str]:
    """Fill in the fused trainer's errors against stock, and say which are too large."""
    errors = measure([stock], [fused], LOSS_SCALE if case.drawn else 0.0)
    result.loss_error, result.worst_parameter = errors.loss, errors.worst_parameter
    result.gradient_error = errors.parameters.get(errors.worst_parameter or "")
    problems = []
    if not errors.loss <= TOLERANCE:
        problems.append(f"loss off by {errors.loss:.1e}")
    if not (result.gradient_error or 0.0) <= TOLERANCE:
        problems.append(f"gradient of {result.worst_parameter} off by {result.gradient_error:.1e}")
    names_only = MEANS_OVER_MICRO_BATCHES if fused.rebalanced else ()
    result.metrics_differ = differing_metrics(stock.metrics, fused.metrics, names_only=names_only)
    return problems + _metric_problems(result) + _row_problems(case, stock, fused, result)


def _stock_gives_it_too(
    case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data, fused: Outcome
) -> bool:
    """Whether stock, with weights moved by no more than their rounding, gives what the fused trainer does."""
    generator = torch.Generator().manual_seed(case.seed)
    for _ in range(MOVES):
        moved = {name: _moved(weight, generator) for name, weight in start.items()}
        stock = run_case(load_weights(stock_trainer(case, settings), moved), case, data, settings.dtype)
        if not _float32_problems(case, stock, fused, Result(case.name, case.description)):
            return True
    return False


def _moved(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return weight * (1 + torch.finfo(torch.float32).eps * torch.randn(weight.shape, generator=generator))


def _compare_bfloat16(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        start = initial_weights(case, settings)
    reference, stock, fused = [], [], []
    for seed in range(case.seed, case.seed + bfloat16_batches(case)):
        data = make_data(case, load_weights(float64_trainer(case, settings), start), seed)
        reference.append(run_case(load_weights(float64_trainer(case, settings), start), case, data, settings.dtype))
        if not math.isfinite(reference[-1].loss):  # eager attention's softmax: a float64 mask overflows in float32
            raise SkippedError("in float64 its own attention is not finite: there is no reference")
        with stock_may_fail(case):
            stock.append(run_case(load_weights(stock_trainer(case, settings), start), case, data, settings.dtype))
        fused.append(_run_fused(case, settings, start, data))
        if seed == case.seed:
            _fill(result, case, stock[0], fused[0])
            _compare_liger(case, settings, start, data, stock[0], result)
    result.metrics_differ = differing_metrics(stock[0].metrics, fused[0].metrics, values=False)
    errors, stock_errors = measure(reference, fused), measure(reference, stock)
    return _bfloat16_problems(errors, stock_errors, result) + _metric_problems(result)


def _bfloat16_problems(errors: Errors, stock_errors: Errors, result: Result) -> list[str]:
    """Fill in the fused trainer's errors beside stock's, both against float64, and say which are too large."""
    result.loss_error, result.stock_loss_error = errors.loss, stock_errors.loss
    result.worst_parameter = _worst_relative_to_stock(errors, stock_errors)
    result.gradient_error = errors.parameters.get(result.worst_parameter or "")
    result.stock_gradient_error = stock_errors.parameters.get(result.worst_parameter or "")
    problems = []
    if not errors.loss <= LOSS_SLACK * stock_errors.loss + LOSS_FLOOR:
        problems.append(f"loss {errors.loss:.1e} from float64, stock {stock_errors.loss:.1e}")
    if not errors.gradient <= SLACK * stock_errors.gradient + TOLERANCE:
        problems.append(f"gradients {errors.gradient:.1e} from float64, stock {stock_errors.gradient:.1e}")
    if not (result.gradient_error or 0.0) <= PARAMETER_SLACK * (result.stock_gradient_error or 0.0) + TOLERANCE:
        problems.append(
            f"gradient of {result.worst_parameter} {result.gradient_error:.1e} from float64, "
            f"stock {result.stock_gradient_error:.1e}"
        )
    return problems


def bfloat16_batches(case: Case) -> int:
    """How many batches are pooled in bfloat16: more where all tokens of a sequence share one weight and its error."""
    is_given = getattr(case.data, "old", None) or getattr(case.data, "sampling", None)
    of_sequences = (
        case.config.get("loss_type") == "vespo"
        or case.config.get("importance_sampling_level") == "sequence"
        or case.config.get("vllm_importance_sampling_mode", "").startswith("sequence")
    )
    return SEQUENCE_WEIGHT_BATCHES if is_given and of_sequences else BFLOAT16_BATCHES


def _worst_relative_to_stock(errors: Errors, stock_errors: Errors) -> str | None:
    """The parameter that comes closest to its tolerance."""

    def ratio(name: str) -> float:
        value = errors.parameters[name] / (stock_errors.parameters[name] + TOLERANCE)
        return math.inf if math.isnan(value) else value

    return max(errors.parameters, key=ratio, default=None)


def _metric_problems(result: Result) -> list[str]:
    return [f"metrics differ: {', '.join(result.metrics_differ)}"] if result.metrics_differ else []


def _row_problems(case: Case, stock: Outcome, fused: Outcome, result: Result) -> list[str]:
    may_be_empty = any(getattr(case.data, name, ()) for name in ("empty_rows", "empty_micro_batches", "truncated_rows"))
    if case.mode == "train" and not fused.rows and not (case.drawn and (stock.norm == 0.0 or may_be_empty)):
        return ["no row went through the fused function"]
    if case.recomputed == "none" and result.recomputed:
        return [f"{result.recomputed:.1%} of rows recomputed, none expected"]
    if case.recomputed == "some" and not result.recomputed:
        return ["no row recomputed although the forecast was wrong"]
    return []


def _run_fused(case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data) -> Outcome:
    try:
        trainer = load_weights(fused_trainer(case, settings), start)
        with wrong_forecasts() if case.wrong_forecast else nullcontext():
            return run_case(trainer, case, data, settings.dtype)
    except ValueError as error:
        if not (case.drawn and any(str(error).startswith(f"{option}=") for option in REFUSABLE & case.fused.keys())):
            raise
        raise SkippedError(f"the fused trainer refuses: {error}") from error


@contextmanager
def wrong_forecasts() -> Generator[None, None, None]:
    """Within the context, the forecast gradient of every token is wrong by a factor of its own."""
    from trl_fused_grpo import FusedLinearGRPOLoss

    true_forecast = FusedLinearGRPOLoss.forecast

    def wrong_forecast(self: FusedLinearGRPOLoss, *args: Any, **kwargs: Any) -> Any:
        forecast: Any = true_forecast(self, *args, **kwargs)
        scale = forecast.terms.scale
        factors = torch.linspace(-1.0, 2.0, scale.numel(), device=scale.device)
        return replace(forecast, terms=replace(forecast.terms, scale=scale * factors.view_as(scale)))

    with mock.patch.object(FusedLinearGRPOLoss, "forecast", wrong_forecast):
        yield


def _fill(result: Result, case: Case, stock: Outcome, fused: Outcome) -> None:
    result.loss, result.layout = stock.loss, fused.layout
    if case.mode == "train":
        result.fused_ratio = _norm_ratio(fused, stock)
        if fused.rows is not None:
            result.recomputed = (fused.recomputed or 0) / max(fused.rows, 1)


def _norm_ratio(outcome: Outcome, stock: Outcome) -> float | None:
    return outcome.norm / stock.norm if stock.norm else None


def _compare_liger(
    case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data, stock: Outcome, result: Result
) -> None:
    if not (has_liger_loss() and case.compare_liger and case.mode == "train"):
        return
    try:
        trainer = load_weights(stock_liger_trainer(case, settings), start)
        liger = run_case(trainer, case, data, settings.dtype)
        result.liger_ratio, result.liger_error = _norm_ratio(liger, stock), measure([stock], [liger]).gradient
    except RefusedError:
        result.liger = "refuses"
    except Exception:  # shown in the table: a failure of TRL's Liger loss is not one of the fused trainer
        result.liger = "fails"
