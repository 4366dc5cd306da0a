"""Runs a drawn case or a whole training on the stock and on the fused trainer, and gives the verdict."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trl_fused_grpo.parity.case import Case, SkippedError
from trl_fused_grpo.parity.compare import check_reference, fill, problems_of_batches, result_of
from trl_fused_grpo.parity.result import Result
from trl_fused_grpo.parity.run_case import Data, Restarted, stock_may_fail
from trl_fused_grpo.parity.trainers import Settings, load_weights, noisy_weights

from .case import DrawnCase, Training
from .chance import chance_verdict
from .flips import flip_verdict
from .judge import bfloat16_rounds, changed_problems, problems_of, row_problems, warning_problems
from .rounding import Compared, rounding_verdict, training_verdict
from .run_training import StockFailedError, run_both
from .steps import Outcome, float64_trainer, fused_trainer, make_data, run_steps, stock_trainer
from .training_errors import problems_of as problems_of_training


DEVICE_LOST = "the device is lost"  # how the reason of such a result begins
# Options that the fused trainer refuses where they cannot be had, and how its message begins. The last is that of a
# batch whose ratios are given to a trainer without vLLM, where the constructor could not know of them
REFUSALS = {
    "fused_layout": ("fused_layout=",),
    "fused_backward": ("fused_backward=", 'backward="forecast" needs a forecast'),
}


def compare(case: DrawnCase | Training, settings: Settings) -> Result:
    """The result of a case, see [`trl_fused_grpo.parity.compare`]."""

    def run(result: Result) -> list[str]:
        with _skipped_where_refused(case):
            if isinstance(case, Training):
                return _compare_training(case, settings, result)
            steps = _compare_bfloat16 if settings.dtype == torch.bfloat16 else _compare_float32
            return steps(case, settings, result)

    result = result_of(case, settings, run)
    if settings.device == "cuda" and (loss := _device_loss()):
        result.verdict, result.reason = "failed", f"{DEVICE_LOST}: {loss}; {result.reason}"
    return result


def is_device_lost(result: Result) -> bool:
    """Return `True` if this process can run nothing more on its GPU."""
    return result.reason.startswith(DEVICE_LOST)


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


@contextmanager
def _skipped_where_refused(case: Case) -> Generator[None, None, None]:
    """While it lasts, a drawn case is skipped where the fused trainer refuses an option of it."""
    is_drawn = case.drawn if isinstance(case, Training) else True
    try:
        yield
    except ValueError as error:
        refusals = [start for option in REFUSALS.keys() & case.fused.keys() for start in REFUSALS[option]]
        if not (is_drawn and str(error).startswith(tuple(refusals))):
            raise
        raise SkippedError(f"the fused trainer refuses: {error}") from error


def _compare_training(case: Training, settings: Settings, result: Result) -> list[str]:
    if settings.dtype == torch.bfloat16:
        raise SkippedError("trainings are compared in float32")
    try:
        pair = run_both(case, settings)
    except StockFailedError as error:
        if not case.drawn:
            raise
        raise SkippedError(str(error)) from error
    problems = problems_of_training(case, pair, result)
    if problems and case.drawn:
        result.verdict = training_verdict(case, pair) or ""
    return problems


def _compare_float32(case: DrawnCase, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        data = make_data(case, load_weights(trainer, start), case.seed)
        stock = run_steps(trainer, case, data, settings.dtype)
    _skip_where_not_finite(stock)
    fused = _run_fused(case, settings, start, data)
    fill(result, case, stock, fused)
    problems = problems_of(case, stock, fused, result)
    others = row_problems(case, stock, fused) + _changed_by_verify(case, settings, start, data, fused)
    if not problems:
        others += warning_problems(fused)
    if problems and not others:
        result.verdict = rounding_verdict(case, settings, Compared(start, data, stock, fused)) or ""
    return problems + others


def _run_fused(case: DrawnCase, settings: Settings, start: dict[str, torch.Tensor], data: Data) -> Outcome:
    return run_steps(load_weights(fused_trainer(case, settings), start), case, data, settings.dtype)


def _skip_where_not_finite(stock: Outcome) -> None:
    """A case of which stock's numbers are not finite has nothing to be compared with."""
    if not (math.isfinite(stock.loss) and math.isfinite(stock.norm)):
        raise SkippedError("stock's own loss or gradient is not finite")


def _changed_by_verify(
    case: DrawnCase, settings: Settings, start: dict[str, torch.Tensor], data: Data, fused: Outcome
) -> list[str]:
    """
    What `fused_verify` changes, beside a run without it. Not on CUDA, where two runs are not equal to the bit as it is.
    """
    plain = {name: value for name, value in case.fused.items() if name != "fused_verify"}
    if len(plain) == len(case.fused) or settings.device != "cpu":
        return []
    without = replace(case, fused=plain)
    return changed_problems(fused, _run_fused(without, settings, start, data))


def _compare_bfloat16(case: DrawnCase, settings: Settings, result: Result) -> list[str]:
    with stock_may_fail(case):
        trainer = stock_trainer(case, settings)
        start = noisy_weights(trainer, case.noise)
        stock_arm = Restarted(trainer, start)
        reference_arm = Restarted(float64_trainer(case, settings), start)
    fused_arm = Restarted(load_weights(fused_trainer(case, settings), start), start)
    reference, stock, fused = [], [], []
    rounds, problems = bfloat16_rounds(case), []
    for seed in range(case.seed, case.seed + rounds[-1]):
        with stock_may_fail(case):
            data = make_data(case, reference_arm(), seed)
            reference.append(run_steps(reference_arm(), case, data, settings.dtype))
            check_reference(reference[-1])
            stock.append(run_steps(stock_arm(), case, data, settings.dtype))
        _skip_where_not_finite(stock[-1])
        fused.append(run_steps(fused_arm(), case, data, settings.dtype))
        if seed == case.seed:
            fill(result, case, stock[0], fused[0])
        if len(fused) in rounds:
            problems = problems_of_batches(reference, stock, fused, result)
            if problems and len(fused) in rounds[-2:] and not result.metrics_differ:
                verdict = flip_verdict(reference, stock, fused)
                if verdict is None and len(fused) == rounds[-1]:
                    verdict = chance_verdict(reference, stock, fused)
                result.verdict = verdict or ""
            if not problems or result.metrics_differ or result.verdict:
                break
    return problems
