"""Runs one case on the stock trainer, the fused one and stock Liger: errors, differing metrics, verdict."""

import math
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import trl
from packaging.version import Version

from .case import Case, SkippedError
from .errors import differing_metrics, measure
from .judge import bfloat16_problems, bfloat16_rounds, float32_problems, metric_problems, row_problems
from .result import Result
from .run_case import Data, Outcome, Restarted, make_data, run_case, stock_may_fail
from .trainers import (
    RefusedError,
    Settings,
    float64_trainer,
    fused_trainer,
    has_liger_loss,
    load_weights,
    noisy_weights,
    stock_liger_trainer,
    stock_trainer,
)


def compare(case: Case, settings: Settings) -> Result:
    """
    Run one case on every trainer.

    Args:
        case ([`Case`]): what to run.
        settings ([`Settings`]): device and dtype.

    Returns:
        [`Result`]:
            Also when a trainer raises: the verdict is then `"failed"` and the reason names the exception.
    """
    run = _compare_bfloat16 if settings.dtype == torch.bfloat16 else _compare_float32
    return result_of(case, settings, lambda result: run(case, settings, result))


def result_of(case: Case, settings: Settings, run: Callable[[Result], list[str]]) -> Result:
    """
    The result of a case.

    Args:
        case ([`Case`]): what runs.
        settings ([`Settings`]): device and dtype.
        run (`Callable`): runs it, fills in the figures of the result, and returns what is not equal. It may set the
            verdict.
    """
    result = Result(case.name, case.description, verdict="")
    start = time.perf_counter()
    try:
        if case.min_trl is not None and Version(trl.__version__) < Version(case.min_trl):
            raise SkippedError(f"needs TRL {case.min_trl}")
        if settings.dtype == torch.bfloat16 and not case.compare_bf16:
            raise SkippedError("in bfloat16, rounding decides the routing of experts")
        with _without_tf32():
            problems = run(result)
        result.verdict = result.verdict or ("different" if problems else "equal")
        result.reason = "; ".join(problems)
    except SkippedError as missing:
        result.verdict, result.reason = "skipped", str(missing)
    except Exception as error:  # one broken case must not hide the others
        result.verdict, result.reason = "failed", _describe(error)
    result.seconds = time.perf_counter() - start
    return result


@contextmanager
def _without_tf32() -> Generator[None, None, None]:
    """
    While it lasts, float32 is float32: torch lets cuDNN round the convolutions of vision towers to ten bits, so that
    two ways through them differ by 1e-4.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def _compare_float32(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        data = make_data(case, load_weights(trainer, start))
        stock = run_case(trainer, case, data, settings.dtype)
    with wrong_forecasts() if case.wrong_forecast else nullcontext():
        fused = run_case(load_weights(fused_trainer(case, settings), start), case, data, settings.dtype)
    fill(result, case, stock, fused)
    _compare_liger(case, settings, start, data, stock, result)
    return float32_problems(stock, fused, result) + row_problems(case, fused, result)


def _compare_bfloat16(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        stock_arm = Restarted(trainer, start)
        reference_arm = Restarted(float64_trainer(case, settings), start)
    fused_arm = Restarted(load_weights(fused_trainer(case, settings), start), start)
    reference, stock, fused = [], [], []
    rounds, problems = bfloat16_rounds(case), []
    for seed in range(rounds[-1]):
        with stock_may_fail(case):
            data = make_data(case, reference_arm(), seed)
            reference.append(run_case(reference_arm(), case, data, settings.dtype))
            check_reference(reference[-1])
            stock.append(run_case(stock_arm(), case, data, settings.dtype))
        with wrong_forecasts() if case.wrong_forecast else nullcontext():
            fused.append(run_case(fused_arm(), case, data, settings.dtype))
        if seed == 0:
            fill(result, case, stock[0], fused[0])
            _compare_liger(case, settings, start, data, stock[0], result)
        if len(fused) in rounds:
            problems = problems_of_batches(reference, stock, fused, result)
            if not problems or result.metrics_differ:
                break
    return problems


def check_reference(reference: Outcome) -> None:
    """Skip a case where eager attention's softmax is not finite: a float64 mask overflows in float32."""
    if not math.isfinite(reference.loss):
        raise SkippedError("in float64 its own attention is not finite: there is no reference")


def problems_of_batches(
    reference: list[Outcome], stock: list[Outcome], fused: list[Outcome], result: Result
) -> list[str]:
    """What is not equal in bfloat16, over batches, one outcome each; the figures are filled in."""
    result.metrics_differ = differing_metrics(stock[0].metrics, fused[0].metrics, values=False)
    errors, stock_errors = measure(reference, fused), measure(reference, stock)
    return bfloat16_problems(errors, stock_errors, result) + metric_problems(result)


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


def fill(result: Result, case: Case, stock: Outcome, fused: Outcome) -> None:
    """Fill in the figures that do not depend on what counts as right."""
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
