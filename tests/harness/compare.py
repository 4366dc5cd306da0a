"""Runs a drawn case or a whole training on the stock and on the fused trainer, and gives the verdict."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trl_fused_grpo.parity.case import Case, SkippedError, Trainer
from trl_fused_grpo.parity.compare import Comparison
from trl_fused_grpo.parity.judge import Result
from trl_fused_grpo.parity.tiny.batches import Data
from trl_fused_grpo.parity.trainers import Settings, load_weights

from . import steps
from .case import DrawnCase, Training
from .chance import chance_verdict
from .flips import flip_verdict
from .judge import bfloat16_rounds, changed_problems, problems_of, row_problems, warning_problems
from .rounding import Compared, rounding_verdict, training_verdict
from .run_training import StockFailedError, run_both
from .steps import Outcome
from .training_errors import problems_of as problems_of_training


DEVICE_LOST = "the device is lost"  # how the reason of such a result begins
# Options that the fused trainer refuses where they cannot be had, and how its message begins. The last is that of a
# batch whose ratios are given to a trainer without vLLM, where the constructor could not know of them
REFUSALS = {
    "fused_layout": ("fused_layout=",),
    "fused_backward": ("fused_backward=", 'backward="forecast" needs a forecast'),
}


def compare(case: DrawnCase | Training, settings: Settings) -> Result:
    """Return the result of a case, see [`trl_fused_grpo.parity.compare`]."""
    comparison = TrainingComparison if isinstance(case, Training) else DrawnComparison
    result = comparison(case, settings).run()
    if settings.device == "cuda" and (loss := _device_loss()):
        result.verdict, result.reason = "failed", f"{DEVICE_LOST}: {loss}; {result.reason}"
    return result


class TrainingComparison(Comparison):
    """A whole training on the stock trainer and the fused one, in float32."""

    def problems(self) -> list[str]:
        """Say what is not equal, see [`Comparison.problems`]."""
        case = self.case
        if self.settings.dtype == torch.bfloat16:
            raise SkippedError("trainings are compared in float32")
        try:
            with _skipped_where_refused(case, case.drawn):
                pair = run_both(case, self.settings)
        except StockFailedError as error:
            if not case.drawn:
                raise
            raise SkippedError(str(error)) from error
        problems = problems_of_training(case, pair, self.result)
        if problems and case.drawn:
            self.result.verdict = training_verdict(case, pair) or ""
        return problems


class DrawnComparison(Comparison):
    """Single steps of a drawn case, with what a user changes. Ties are told from differences."""

    stock_trainer = staticmethod(steps.stock_trainer)
    float64_trainer = staticmethod(steps.float64_trainer)
    fused_trainer = staticmethod(steps.fused_trainer)
    make_data = staticmethod(steps.make_data)
    run_steps = staticmethod(steps.run_steps)
    rounds_of = staticmethod(bfloat16_rounds)

    def problems(self) -> list[str]:
        """Say what is not equal, see [`Comparison.problems`]."""
        with _skipped_where_refused(self.case):
            return super().problems()

    def run_stock(self, trainer: Trainer, data: Data) -> Outcome:
        """Take stock's trainer through the case. Where its numbers are not finite, there is nothing to compare with."""
        stock = self.run_steps(trainer, self.case, data, self.settings.dtype)
        if not (math.isfinite(stock.loss) and math.isfinite(stock.norm)):
            raise SkippedError("stock's own loss or gradient is not finite")
        return stock

    def float32_problems(self, start: dict[str, torch.Tensor], data: Data, stock: Outcome, fused: Outcome) -> list[str]:
        """Say what is not equal in float32. Where rounding explains it, the verdict says so."""
        case, settings = self.case, self.settings
        problems = problems_of(case, stock, fused, self.result)
        others = row_problems(case, stock, fused) + self._changed_by_verify(start, data, fused)
        if not problems:
            others += warning_problems(fused)
        if problems and not others:
            self.result.verdict = rounding_verdict(case, settings, Compared(start, data, stock, fused)) or ""
        return problems + others

    def _changed_by_verify(self, start: dict[str, torch.Tensor], data: Data, fused: Outcome) -> list[str]:
        """Not on CUDA, where two runs are not equal to the bit as it is."""
        case, settings = self.case, self.settings
        plain = {name: value for name, value in case.fused.items() if name != "fused_verify"}
        if len(plain) == len(case.fused) or settings.device != "cpu":
            return []
        trainer = self.fused_trainer(replace(case, fused=plain), settings)
        return changed_problems(fused, self.run_fused(load_weights(trainer, start), data))

    def excuse(self, reference: list[Outcome], stock: list[Outcome], fused: list[Outcome]) -> str | None:
        """Return `"tie"` or `"rounding"` where a bound or chance explains what exceeds a limit in the last batches."""
        rounds = self.rounds_of(self.case)
        if len(fused) not in rounds[-2:]:
            return None
        verdict = flip_verdict(reference, stock, fused)
        if verdict is None and len(fused) == rounds[-1]:
            verdict = chance_verdict(reference, stock, fused)
        return verdict


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
def _skipped_where_refused(case: Case, is_drawn: bool = True) -> Generator[None, None, None]:
    """While it lasts, a drawn case is skipped where the fused trainer refuses an option of it."""
    try:
        yield
    except ValueError as error:
        refusals = [start for option in REFUSALS.keys() & case.fused.keys() for start in REFUSALS[option]]
        if not (is_drawn and str(error).startswith(tuple(refusals))):
            raise
        raise SkippedError(f"the fused trainer refuses: {error}") from error
