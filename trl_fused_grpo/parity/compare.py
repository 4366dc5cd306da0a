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

from .case import Case, SkippedError, Trainer
from .chance import chance_verdict
from .errors import differing_metrics, measure
from .flips import flip_verdict
from .judge import (
    bfloat16_problems,
    bfloat16_rounds,
    changed_problems,
    float32_problems,
    metric_problems,
    row_problems,
    warning_problems,
)
from .result import DEVICE_LOST, Result
from .rounding import Compared, rounding_verdict, training_verdict
from .run_case import Data, Outcome, Restarted, make_data, run_case, stock_may_fail
from .run_training import StockFailedError, run_both
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
from .training_errors import problems_of


# Options that the fused trainer refuses where they cannot be had, and how its message begins. The last is that of a
# batch whose ratios are given to a trainer without vLLM, where the constructor could not know of them
REFUSALS = {
    "fused_layout": ("fused_layout=",),
    "fused_backward": ("fused_backward=", 'backward="forecast" needs a forecast'),
}


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
        with _without_tf32():
            problems = runner(case, settings, result)
        if not result.is_rounding:
            result.verdict = "different" if problems else "equal"
        result.reason = "; ".join(problems)
    except SkippedError as missing:
        result.verdict, result.reason = "skipped", str(missing)
    except Exception as error:  # one broken case must not hide the others
        result.reason = _describe(error)
    if settings.device == "cuda" and (loss := _device_loss()):
        result.verdict, result.reason = "failed", f"{DEVICE_LOST}: {loss}; {result.reason}"
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


def _device_loss() -> str:
    """
    The error that every later call of CUDA raises again, or an empty text. A kernel that reads out of bounds fails
    after the call that launched it: the next case, or stock in it, seems to.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def _compare_training(case: Case, settings: Settings, result: Result) -> list[str]:
    try:
        with _skipped_where_refused(case):
            pair = run_both(case, settings)
    except StockFailedError as error:
        if not case.drawn:
            raise
        raise SkippedError(str(error)) from error
    problems = problems_of(case, pair, result)
    if problems and case.drawn:
        result.verdict = training_verdict(case, pair) or result.verdict
    return problems


def _compare_float32(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        data = make_data(case, load_weights(trainer, start), case.seed)
        stock = run_case(trainer, case, data, settings.dtype)
    _skip_where_not_finite(case, stock)
    fused = _run_fused(_new_fused(case, settings, start), case, settings, data)
    _fill(result, case, stock, fused)
    _compare_liger(case, settings, start, data, stock, result)
    problems = float32_problems(case, stock, fused, result)
    others = row_problems(case, stock, fused, result) + _changed_by_verify(case, settings, start, data, fused)
    if not problems:
        others += warning_problems(fused)
    if problems and case.drawn and not others:
        result.verdict = rounding_verdict(case, settings, Compared(start, data, stock, fused)) or result.verdict
    return problems + others


def _skip_where_not_finite(case: Case, stock: Outcome) -> None:
    """A drawn case of which stock's numbers are not finite has nothing to be compared with."""
    if case.drawn and not (math.isfinite(stock.loss) and math.isfinite(stock.norm)):
        raise SkippedError("stock's own loss or gradient is not finite")


def _changed_by_verify(
    case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data, fused: Outcome
) -> list[str]:
    """
    What `fused_verify` changes, beside a run without it. Not on CUDA, where two runs are not equal to the bit as it is.
    """
    plain = {name: value for name, value in case.fused.items() if name != "fused_verify"}
    if len(plain) == len(case.fused) or settings.device != "cpu":
        return []
    without = replace(case, fused=plain)
    return changed_problems(fused, _run_fused(_new_fused(without, settings, start), without, settings, data))


def _compare_bfloat16(case: Case, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        stock_arm = Restarted(trainer, start)
        reference_arm = Restarted(float64_trainer(case, settings), start)
    fused_arm = Restarted(_new_fused(case, settings, start), start)
    reference, stock, fused = [], [], []
    rounds = bfloat16_rounds(case)
    for seed in range(case.seed, case.seed + rounds[-1]):
        with stock_may_fail(case):
            data = make_data(case, reference_arm(), seed)
            reference.append(run_case(reference_arm(), case, data, settings.dtype))
        if not math.isfinite(reference[-1].loss):  # eager attention's softmax: a float64 mask overflows in float32
            raise SkippedError("in float64 its own attention is not finite: there is no reference")
        with stock_may_fail(case):
            stock.append(run_case(stock_arm(), case, data, settings.dtype))
        _skip_where_not_finite(case, stock[-1])
        fused.append(_run_fused(fused_arm(), case, settings, data))
        if seed == case.seed:
            _fill(result, case, stock[0], fused[0])
            _compare_liger(case, settings, start, data, stock[0], result)
        if len(fused) in rounds:
            problems = _bfloat16_problems(reference, stock, fused, result)
            if problems and case.drawn and len(fused) in rounds[-2:] and not result.metrics_differ:
                result.verdict = flip_verdict(reference, stock, fused) or result.verdict
                if len(fused) == rounds[-1] and not result.is_rounding:
                    result.verdict = chance_verdict(reference, stock, fused) or result.verdict
            if not problems or result.metrics_differ or result.is_rounding:
                break
    return problems


def _bfloat16_problems(
    reference: list[Outcome], stock: list[Outcome], fused: list[Outcome], result: Result
) -> list[str]:
    result.metrics_differ = differing_metrics(stock[0].metrics, fused[0].metrics, values=False)
    errors, stock_errors = measure(reference, fused), measure(reference, stock)
    return bfloat16_problems(errors, stock_errors, result) + metric_problems(result)


def _new_fused(case: Case, settings: Settings, start: dict[str, torch.Tensor]) -> Trainer:
    with _skipped_where_refused(case):
        return load_weights(fused_trainer(case, settings), start)


def _run_fused(trainer: Trainer, case: Case, settings: Settings, data: Data) -> Outcome:
    with _skipped_where_refused(case), wrong_forecasts() if case.wrong_forecast else nullcontext():
        return run_case(trainer, case, data, settings.dtype)


@contextmanager
def _skipped_where_refused(case: Case) -> Generator[None, None, None]:
    """While it lasts, a drawn case is skipped where the fused trainer refuses an option of it."""
    try:
        yield
    except ValueError as error:
        refusals = [start for option in REFUSALS.keys() & case.fused.keys() for start in REFUSALS[option]]
        if not (case.drawn and str(error).startswith(tuple(refusals))):
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
