"""Says which errors are too large: in float32 against stock, in bfloat16 beside stock's own error against float64."""

import torch

from .case import Case
from .errors import Errors, differing_metrics, largest, measure
from .result import Result
from .run_case import Outcome


TOLERANCE = 1e-5  # float32: loss and every gradient, relative to stock
# bfloat16: both trainers round differently. Which of them is closer to float64 is chance, so that a limit of exactly
# stock's error would fail every other case. Several batches are pooled, and the limits leave room for chance: 10% over
# all gradients, 25% for one parameter, each plus TOLERANCE. The loss is one number a batch: the ratio of two root mean
# squares of four exceeds 2 in one case of ten. LOSS_FLOOR is half a unit in the last place of a bfloat16 number.
BFLOAT16_BATCHES = 4
# The weight of a whole sequence is an exponential of a sum over its tokens. All gradients of the sequence share its
# rounding error, so that a batch has 6 independent errors instead of about 50. Groups of four of VESPO's batches had
# 0.71 to 1.20 times stock's error (16 groups, median 1.02, all 64 batches together 0.90), hence eight times as many.
SEQUENCE_WEIGHT_BATCHES = 32
# Of many cases some exceed a limit by chance. Such a case is judged over so many times as many batches: chance shrinks
# with them, a fault does not
AGAIN = 4
SLACK, PARAMETER_SLACK, LOSS_SLACK = 1.1, 1.25, 2.0
LOSS_FLOOR = torch.finfo(torch.bfloat16).eps / 2
NO_ROW = "no row went through the fused function"


def float32_problems(stock: Outcome, fused: Outcome, result: Result, loss_scale: float = 0.0) -> list[str]:
    """Fill in the fused trainer's errors against stock, see [`measure`], and say which are too large."""
    errors = measure([stock], [fused], loss_scale)
    result.loss_error, result.worst_parameter = errors.loss, errors.worst_parameter
    result.gradient_error = errors.parameters.get(result.worst_parameter or "")
    problems = []
    if not errors.loss <= TOLERANCE:
        problems.append(f"loss off by {errors.loss:.1e}")
    if not (result.gradient_error or 0.0) <= TOLERANCE:
        problems.append(f"gradient of {result.worst_parameter} off by {result.gradient_error:.1e}")
    result.metrics_differ = differing_metrics(stock.metrics, fused.metrics)
    return problems + metric_problems(result)


def bfloat16_problems(errors: Errors, stock_errors: Errors, result: Result) -> list[str]:
    """Fill in the fused trainer's errors beside stock's, both against float64, and say which are too large."""
    result.loss_error, result.stock_loss_error = errors.loss, stock_errors.loss
    tolerances = {name: error + TOLERANCE for name, error in stock_errors.parameters.items()}
    result.worst_parameter = largest({name: error / tolerances[name] for name, error in errors.parameters.items()})
    result.gradient_error = errors.parameters.get(result.worst_parameter or "")
    result.stock_gradient_error = stock_errors.parameters.get(result.worst_parameter or "")
    problems = []
    if exceeds(errors.loss, stock_errors.loss, LOSS_SLACK, LOSS_FLOOR):
        problems.append(f"loss {errors.loss:.1e} from float64, stock {stock_errors.loss:.1e}")
    if exceeds(errors.gradient, stock_errors.gradient, SLACK):
        problems.append(f"gradients {errors.gradient:.1e} from float64, stock {stock_errors.gradient:.1e}")
    if exceeds(result.gradient_error or 0.0, result.stock_gradient_error or 0.0, PARAMETER_SLACK):
        problems.append(
            f"gradient of {result.worst_parameter} {result.gradient_error:.1e} from float64, "
            f"stock {result.stock_gradient_error:.1e}"
        )
    return problems


def exceeds(error: float, stock_error: float, slack: float, floor: float = TOLERANCE) -> bool:
    """Return `True` if an error in bfloat16 is more than `slack` times stock's plus `floor`; NaN is."""
    return not error <= slack * stock_error + floor


def bfloat16_batches(case: Case) -> int:
    """Return how many batches are pooled: more where all tokens of a sequence share one weight and its error."""
    is_given = getattr(case.data, "old", None) or getattr(case.data, "sampling", None)
    of_sequences = (
        case.config.get("loss_type") == "vespo"
        or case.config.get("importance_sampling_level") == "sequence"
        or case.config.get("vllm_importance_sampling_mode", "").startswith("sequence")
    )
    return SEQUENCE_WEIGHT_BATCHES if is_given and of_sequences else BFLOAT16_BATCHES


def bfloat16_rounds(case: Case) -> list[int]:
    """Return over how many batches a case is judged: the first, and where it exceeds a limit the next ones."""
    return [bfloat16_batches(case), AGAIN * bfloat16_batches(case)]


def metric_problems(result: Result) -> list[str]:
    """Say which metrics differ."""
    return [f"metrics differ: {', '.join(result.metrics_differ)}"] if result.metrics_differ else []


def row_problems(case: Case, fused: Outcome, result: Result) -> list[str]:
    """Say if no row went through the fused function, or if rows were recomputed where the forecast is right."""
    if case.mode == "train" and not fused.rows:
        return [NO_ROW]
    if case.recomputed == "none" and result.recomputed:
        return [f"{result.recomputed:.1%} of rows recomputed, none expected"]
    if case.recomputed == "some" and not result.recomputed:
        return ["no row recomputed although the forecast was wrong"]
    return []
