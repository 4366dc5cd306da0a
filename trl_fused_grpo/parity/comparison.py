"""Stock, ours and stock Liger on one case: errors, differing metrics, verdict."""

import math
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import trl
from packaging.version import Version

from .case import Case, SkippedError
from .errors import MEANS_OVER_MICRO_BATCHES, Errors, differing_metrics, measure
from .play import Data, Outcome, make_data, play
from .trainers import RefusedError, Settings, fused, has_liger_loss, load, oracle, stock, stock_liger, weights
from .training import run_both
from .training_errors import problems_of


TOLERANCE = 1e-5  # float32: loss and every gradient, relative to stock

# bfloat16: both trainers round differently, so their distances from float64 differ by chance either way, and a limit of
# exactly stock's error would fail every other case. Several batches are pooled, and what chance is left is allowed for:
# 10% over all gradients, 25% for one parameter, each beside a floor of TOLERANCE. The loss is one number a batch: the
# ratio of two root mean squares of four exceeds 2 in one case of ten, and half a unit in the last place of a bfloat16
# number (LOSS_FLOOR) means nothing.
BFLOAT16_BATCHES = 4
# The weight of a whole sequence is an exponential of a sum over its tokens, whose rounding error all its gradients
# share: such a batch holds 6 errors instead of some 50. Groups of four of VESPO's batches were found at 0.71 to 1.20
# times stock's error (16 groups, median 1.02, all 64 batches together 0.90), so eight times as many are pooled.
SEQUENCE_WEIGHT_BATCHES = 32
SLACK, PARAMETER_SLACK, LOSS_SLACK = 1.1, 1.25, 2.0
LOSS_FLOOR = torch.finfo(torch.bfloat16).eps / 2


@dataclass
class Result:
    """
    Outcome of one case.

    Attributes:
        name (`str`):
            The case's name.
        covers (`str`):
            What the case covers.
        verdict (`str`):
            `"equal"`, `"different"`, `"failed"` (an exception) or `"skipped"` (does not apply here).
        reason (`str`):
            Why it is not equal.
        loss (`float`, *optional*):
            Stock's loss, summed over micro-batches; a training's `train_loss`.
        loss_error (`float`, *optional*):
            Relative error of our loss: against stock's in float32, against float64 in bfloat16.
        gradient_error (`float`, *optional*):
            Relative error of the worst parameter's gradient, same reference: in bfloat16 the worst next to stock's own.
            In a training it is that of its change.
        worst_parameter (`str`, *optional*):
            The parameter it belongs to.
        stock_loss_error, stock_gradient_error (`float`, *optional*):
            Stock's errors against float64 for the same loss and parameter, bfloat16 only.
        metrics_differ (`list[str]`):
            Logged metrics whose names or, in float32, values differ.
        ours_ratio (`float`, *optional*):
            Our gradient norm over stock's.
        liger_ratio (`float`, *optional*):
            Stock Liger's gradient norm over stock's.
        liger (`str`):
            Why there is no `liger_ratio` though the host has a Liger loss: `"refuses"`, `"fails"`, or empty.
        recomputed (`float`, *optional*):
            Fraction of rows that backward had to compute again.
        layout (`str`, *optional*):
            How the fused trainer laid the rows out: `"packed"`, `"aligned"` or `"padded"`.
        seconds (`float`):
            Time the case took.
    """

    name: str
    covers: str
    verdict: str = "failed"
    reason: str = ""
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    stock_loss_error: float | None = None
    stock_gradient_error: float | None = None
    metrics_differ: list[str] = field(default_factory=list)
    ours_ratio: float | None = None
    liger_ratio: float | None = None
    liger: str = ""
    recomputed: float | None = None
    layout: str | None = None
    seconds: float = 0.0


def compare(case: Case, settings: Settings) -> Result:
    """
    Run one case on every path.

    Args:
        case ([`Case`]):
            What to run.
        settings ([`Settings`]):
            Device and dtype.

    Returns:
        [`Result`]:
            Also when a path raises: the verdict is then `"failed"` and the reason names the exception.
    """
    result = Result(case.name, case.covers)
    start = time.perf_counter()
    try:
        if Version(trl.__version__) < Version(case.since):
            raise SkippedError(f"needs TRL {case.since}")
        if settings.dtype == torch.bfloat16 and not case.smooth:
            raise SkippedError("bfloat16 decides the routing of experts by rounding")
        if settings.dtype == torch.bfloat16 and case.customised is not None:
            raise SkippedError("trainings are compared in float32")
        runner = _compare_bfloat16 if settings.dtype == torch.bfloat16 else _compare_float32
        runner = _compare_training if case.customised is not None else runner
        problems = runner(case, settings, result)
        result.verdict, result.reason = "different" if problems else "equal", "; ".join(problems)
    except SkippedError as missing:
        result.verdict, result.reason = "skipped", str(missing)
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
    start = weights(case, settings)
    data = make_data(case, load(stock(case, settings), start), seed=0)
    theirs = play(load(stock(case, settings), start), case, data, settings.dtype)
    ours = _play_ours(case, settings, start, data)
    _fill(result, case, theirs, ours)
    _compare_liger(case, settings, start, data, theirs, result)

    errors = measure([theirs], [ours])
    result.loss_error, result.worst_parameter = errors.loss, errors.worst_parameter
    result.gradient_error = errors.parameters.get(errors.worst_parameter or "")
    problems = []
    if not errors.loss <= TOLERANCE:
        problems.append(f"loss off by {errors.loss:.1e}")
    if not (result.gradient_error or 0.0) <= TOLERANCE:
        problems.append(f"gradient of {result.worst_parameter} off by {result.gradient_error:.1e}")
    follow_the_cut = MEANS_OVER_MICRO_BATCHES if ours.dealt else ()
    result.metrics_differ = differing_metrics(theirs.metrics, ours.metrics, names_only=follow_the_cut)
    return problems + _metric_problems(result) + _row_problems(case, ours, result)


def _compare_bfloat16(case: Case, settings: Settings, result: Result) -> list[str]:
    start = weights(case, settings)
    truths, theirs, ours = [], [], []
    for seed in range(bfloat16_batches(case)):
        data = make_data(case, load(oracle(case, settings), start), seed)
        truths.append(play(load(oracle(case, settings), start), case, data, settings.dtype))
        if not math.isfinite(truths[-1].loss):  # eager attention's softmax is float32, where a float64 mask overflows
            raise SkippedError("in float64 its own attention is not finite: there is no reference")
        theirs.append(play(load(stock(case, settings), start), case, data, settings.dtype))
        ours.append(_play_ours(case, settings, start, data))
        if seed == 0:
            _fill(result, case, theirs[0], ours[0])
            _compare_liger(case, settings, start, data, theirs[0], result)

    mine, stocks = measure(truths, ours), measure(truths, theirs)
    result.loss_error, result.stock_loss_error = mine.loss, stocks.loss
    result.worst_parameter = _worst_beside(mine, stocks)
    result.gradient_error = mine.parameters.get(result.worst_parameter or "")
    result.stock_gradient_error = stocks.parameters.get(result.worst_parameter or "")
    problems = []
    if not mine.loss <= LOSS_SLACK * stocks.loss + LOSS_FLOOR:
        problems.append(f"loss {mine.loss:.1e} from float64, stock {stocks.loss:.1e}")
    if not mine.gradient <= SLACK * stocks.gradient + TOLERANCE:
        problems.append(f"gradients {mine.gradient:.1e} from float64, stock {stocks.gradient:.1e}")
    if not (result.gradient_error or 0.0) <= PARAMETER_SLACK * (result.stock_gradient_error or 0.0) + TOLERANCE:
        problems.append(
            f"gradient of {result.worst_parameter} {result.gradient_error:.1e} from float64, "
            f"stock {result.stock_gradient_error:.1e}"
        )
    result.metrics_differ = differing_metrics(theirs[0].metrics, ours[0].metrics, values=False)
    return problems + _metric_problems(result)


def bfloat16_batches(case: Case) -> int:
    """How many batches are pooled in bfloat16: more where a whole sequence has one weight, and so one error."""
    is_given = getattr(case.data, "old", None) or getattr(case.data, "sampling", None)
    of_sequences = (
        case.config.get("loss_type") == "vespo"
        or case.config.get("importance_sampling_level") == "sequence"
        or case.config.get("vllm_importance_sampling_mode", "").startswith("sequence")
    )
    return SEQUENCE_WEIGHT_BATCHES if is_given and of_sequences else BFLOAT16_BATCHES


def _worst_beside(mine: Errors, stocks: Errors) -> str | None:
    """The parameter that comes closest to its allowance."""

    def strain(name: str) -> float:
        share = mine.parameters[name] / (stocks.parameters[name] + TOLERANCE)
        return share if share == share else float("inf")

    return max(mine.parameters, key=strain, default=None)


def _metric_problems(result: Result) -> list[str]:
    return [f"metrics differ: {', '.join(result.metrics_differ)}"] if result.metrics_differ else []


def _row_problems(case: Case, ours: Outcome, result: Result) -> list[str]:
    if case.mode == "train" and not ours.rows:
        return ["no row went through the fused function"]
    if case.recomputed == "none" and result.recomputed:
        return [f"{result.recomputed:.1%} of rows recomputed, none expected"]
    if case.recomputed == "some" and not result.recomputed:
        return ["no row recomputed although the forecast was wrong"]
    return []


def _play_ours(case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data) -> Outcome:
    trainer = load(fused(case, settings), start)
    with wrong_forecasts() if case.wrong_forecast else nullcontext():
        return play(trainer, case, data, settings.dtype)


@contextmanager
def wrong_forecasts() -> Generator[None, None, None]:
    """Within the context, every forecast is wrong by a different factor for every token."""
    from trl_fused_grpo import FusedLinearGRPOLoss

    right = FusedLinearGRPOLoss.forecast

    def wrong(self: FusedLinearGRPOLoss, *args: Any, **kwargs: Any) -> Any:
        forecast: Any = right(self, *args, **kwargs)
        scale = forecast.terms.scale
        factors = torch.linspace(-1.0, 2.0, scale.numel(), device=scale.device)
        return replace(forecast, terms=replace(forecast.terms, scale=scale * factors.view_as(scale)))

    with mock.patch.object(FusedLinearGRPOLoss, "forecast", wrong):
        yield


def _fill(result: Result, case: Case, theirs: Outcome, ours: Outcome) -> None:
    result.loss, result.layout = theirs.loss, ours.layout
    if case.mode == "train":
        result.ours_ratio = _ratio(ours, theirs)
        if ours.rows is not None:
            result.recomputed = (ours.recomputed or 0) / max(ours.rows, 1)


def _ratio(outcome: Outcome, theirs: Outcome) -> float | None:
    return outcome.norm / theirs.norm if theirs.norm else None


def _compare_liger(
    case: Case, settings: Settings, start: dict[str, torch.Tensor], data: Data, theirs: Outcome, result: Result
) -> None:
    if not has_liger_loss() or case.mode != "train":
        return
    try:
        result.liger_ratio = _ratio(play(load(stock_liger(case, settings), start), case, data, settings.dtype), theirs)
    except RefusedError:
        result.liger = "refuses"
    except Exception:  # stock's failure is shown beside its other figures, and is no failure of ours
        result.liger = "fails"
