"""
Runs cases on the stock trainer, the fused one and stock Liger: errors, differing metrics, verdict. They run in this
process or in several, each with its own checkpoints.
"""

import gc
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from packaging.version import Version

from . import trainers
from .case import Case, SkippedError, Trainer
from .judge import (
    LOSS_FLOOR,
    TOLERANCE,
    Result,
    bfloat16_rounds,
    differing_metrics,
    float32_problems,
    may_be_rounding,
    measure,
    metric_problems,
    problems_beside_float64,
    row_problems,
)
from .run_case import Outcome, Restarted, run_case, stock_may_fail
from .tiny.batches import Data, make_data
from .trainers import Settings, load_weights, noisy_weights


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
    return Comparison(case, settings).run()


class Comparison:
    """
    One case on the stock trainer and the fused one, see [`compare`]. A subclass may build and run them, and judge, in
    another way; an outcome may be a subclass of [`Outcome`].
    """

    stock_trainer: Any = staticmethod(trainers.stock_trainer)
    float64_trainer: Any = staticmethod(trainers.float64_trainer)
    fused_trainer: Any = staticmethod(trainers.fused_trainer)
    make_data: Any = staticmethod(make_data)
    run_steps: Any = staticmethod(run_case)
    rounds_of: Any = staticmethod(bfloat16_rounds)

    def __init__(self, case: Any, settings: Settings):
        self.case, self.settings = case, settings
        self.result = Result(case.name, case.description, verdict="")

    def run(self) -> Result:
        """Run the case, see [`compare`]."""
        case, result, start = self.case, self.result, time.perf_counter()
        try:
            if case.min_trl is not None and Version(trl.__version__) < Version(case.min_trl):
                raise SkippedError(f"needs TRL {case.min_trl}")
            if self.settings.dtype == torch.bfloat16 and not case.compare_bf16:
                raise SkippedError("in bfloat16, rounding decides the routing of experts")
            with _without_tf32():
                problems = self.problems()
            result.verdict = result.verdict or ("different" if problems else "equal")
            result.reason = "; ".join(problems)
        except SkippedError as missing:
            result.verdict, result.reason = "skipped", str(missing)
        except Exception as error:  # one broken case must not hide the others
            result.verdict, result.reason = "failed", _describe(error)
        result.seconds = time.perf_counter() - start
        return result

    def problems(self) -> list[str]:
        """Say what is not equal, and fill in the figures of the result."""
        if self.settings.dtype == torch.bfloat16:
            return self.beside_float64()
        problems = self.in_float32()
        return self.beside_float64() if may_be_rounding(problems, self.case) else problems

    def in_float32(self) -> list[str]:
        """Compare one batch with stock."""
        case, settings = self.case, self.settings
        with stock_may_fail(case):
            trainer = self.stock_trainer(case, settings)
            start = noisy_weights(trainer, case.noise)
            data = self.make_data(case, load_weights(trainer, start), case.seed)
            stock = self.run_stock(trainer, data)
        fused = self.run_fused(load_weights(self.fused_trainer(case, settings), start), data)
        self._fill(start, data, stock, fused)
        return self.float32_problems(start, data, stock, fused)

    def beside_float64(self) -> list[str]:
        """Compare several batches, stock's and the fused trainer's, with float64."""
        case, settings, result = self.case, self.settings, self.result
        with stock_may_fail(case):
            trainer = self.stock_trainer(case, settings)
            start = noisy_weights(trainer, case.noise)
            stock_arm = Restarted(trainer, start)
            reference_arm = Restarted(self.float64_trainer(case, settings), start)
        fused_arm = Restarted(load_weights(self.fused_trainer(case, settings), start), start)
        reference, stock, fused, problems = [], [], [], []
        rounds = self.rounds_of(case)
        loss_floor = LOSS_FLOOR if settings.dtype == torch.bfloat16 else TOLERANCE
        for seed in range(case.seed, case.seed + rounds[-1]):
            with stock_may_fail(case):
                data = self.make_data(case, reference_arm(), seed)
                reference.append(self.run_steps(reference_arm(), case, data, settings.dtype))
                if not math.isfinite(reference[-1].loss):  # a float64 mask overflows in eager attention's softmax
                    raise SkippedError("in float64 its own attention is not finite: there is no reference")
                stock.append(self.run_stock(stock_arm(), data))
            fused.append(self.run_fused(fused_arm(), data))
            if len(fused) == 1:
                self._fill(start, data, stock[0], fused[0])
            if len(fused) in rounds:
                result.metrics_differ = differing_metrics(stock[0].metrics, fused[0].metrics, values=False)
                errors, stock_errors = measure(reference, fused), measure(reference, stock)
                problems = problems_beside_float64(errors, stock_errors, result, loss_floor) + metric_problems(result)
                if problems and not result.metrics_differ:
                    result.verdict = self.excuse(reference, stock, fused) or ""
                if not problems or result.metrics_differ or result.verdict:
                    break
        return problems

    def run_stock(self, trainer: Trainer, data: Data) -> Any:
        """Take stock's trainer through the case."""
        return self.run_steps(trainer, self.case, data, self.settings.dtype)

    def run_fused(self, trainer: Trainer, data: Data) -> Any:
        """Take the fused trainer through the case."""
        with _wrong_forecasts() if self.case.wrong_forecast else nullcontext():
            return self.run_steps(trainer, self.case, data, self.settings.dtype)

    def float32_problems(self, start: dict[str, torch.Tensor], data: Data, stock: Any, fused: Any) -> list[str]:
        """Say what is not equal in float32."""
        return float32_problems(stock, fused, self.result) + row_problems(self.case, fused, self.result)

    def excuse(self, reference: list[Any], stock: list[Any], fused: list[Any]) -> str | None:
        """Return another verdict than `"different"` for what exceeds a limit in bfloat16, or `None`."""
        return None

    def _fill(self, start: dict[str, torch.Tensor], data: Data, stock: Outcome, fused: Outcome) -> None:
        """Fill in the figures that do not depend on what counts as right."""
        result = self.result
        result.loss, result.layout = stock.loss, fused.layout
        if self.case.mode != "train":
            return
        result.fused_ratio = _norm_ratio(fused, stock)
        if fused.rows is not None:
            result.recomputed = (fused.recomputed or 0) / max(fused.rows, 1)
        if trainers.has_liger_loss() and self.case.compare_liger:
            try:
                trainer = load_weights(trainers.stock_liger_trainer(self.case, self.settings), start)
                liger = run_case(trainer, self.case, data, self.settings.dtype)
                result.liger_ratio, result.liger_error = _norm_ratio(liger, stock), measure([stock], [liger]).gradient
            except trainers.RefusedError:
                result.liger = "refuses"
            except Exception:  # shown in the table: a failure of TRL's Liger loss is not one of the fused trainer
                result.liger = "fails"


def _norm_ratio(outcome: Outcome, stock: Outcome) -> float | None:
    return outcome.norm / stock.norm if stock.norm else None


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


@contextmanager
def _without_tf32() -> Generator[None, None, None]:
    """Keep torch from rounding convolutions to ten bits: two ways through a vision tower would differ by 1e-4."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def _wrong_forecasts() -> Generator[None, None, None]:
    """Make the forecast gradient of every token wrong, each by another factor."""
    from trl_fused_grpo.training import requests

    true_forecast = requests.forecast

    def wrong_forecast(*args: Any) -> Any:
        forecast: Any = true_forecast(*args)
        weights = forecast.weights
        factors = torch.linspace(-1.0, 2.0, weights.numel(), device=weights.device)
        return replace(forecast, weights=weights * factors.view_as(weights))

    with mock.patch.object(requests, "forecast", wrong_forecast):
        yield


_folder: tempfile.TemporaryDirectory[str] | None = None  # a worker process's own


def run_cases(
    cases: Sequence[Any],
    settings: Settings,
    jobs: int,
    prepare: Callable[[], None] | None = None,
    compare: Callable[[Any, Settings], Any] = compare,
) -> Generator[Any, None, None]:
    """
    Run cases and yield their results. With several processes the first that ends comes first, so that a case that takes
    minutes does not withhold the others.

    Args:
        cases (`Sequence[Case]`): what to run.
        settings ([`Settings`]): device and dtype.
        jobs (`int`): number of processes; with 1 everything runs in this one.
        prepare (`Callable`, *optional*): called once in each of several processes.
        compare (`Callable`): takes a case and the settings, and returns the result.
    """
    if jobs == 1:
        _freeze_imports()
        yield from (compare(case, settings) for case in cases)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (prepare,)) as pool:
        ended = as_completed([pool.submit(_compare, compare, case, settings) for case in cases])
        try:
            yield from (future.result() for future in ended)
        finally:
            pool.shutdown(cancel_futures=True)


def _freeze_imports() -> None:
    """Leave modules out of garbage collection: with torch's, it takes more time than a small training."""
    gc.collect()
    gc.freeze()


def _prepare(prepare: Callable[[], None] | None) -> None:
    global _folder
    _freeze_imports()
    _folder = tempfile.TemporaryDirectory(prefix="trl-fused-grpo-")
    if prepare is not None:
        prepare()


def _compare(compare: Callable[[Any, Settings], Any], case: Any, settings: Settings) -> Any:
    assert _folder is not None, "see _prepare"
    return compare(case, replace(settings, folder=Path(_folder.name)))
