"""Says which errors are too large: in float32 against stock, in bfloat16 beside stock's own error against float64."""

import math
from dataclasses import replace

import torch

from .case import Case
from .errors import Errors, differing_metrics, measure
from .result import Result
from .run_case import Outcome


TOLERANCE = 1e-5  # float32: loss and every gradient, relative to stock
# Of a drawn case: a smaller loss is a mean whose terms cancel. They move with log-probs of about -10, where float32 has
# steps of 1e-6, so that such a loss may differ by TOLERANCE * LOSS_SCALE = 1e-6
LOSS_SCALE = 0.1
# bfloat16: both trainers round differently. Which of them is closer to float64 is chance, so that a limit of exactly
# stock's error would fail every other case. Several batches are pooled, and the limits leave room for chance: 10% over
# all gradients, 25% for one parameter, each plus TOLERANCE. The loss is one number a batch: the ratio of two root mean
# squares of four exceeds 2 in one case of ten. LOSS_FLOOR is half a unit in the last place of a bfloat16 number.
BFLOAT16_BATCHES = 4
# The weight of a whole sequence is an exponential of a sum over its tokens. All gradients of the sequence share its
# rounding error, so that a batch has 6 independent errors instead of about 50. Groups of four of VESPO's batches had
# 0.71 to 1.20 times stock's error (16 groups, median 1.02, all 64 batches together 0.90), hence eight times as many.
SEQUENCE_WEIGHT_BATCHES = 32
# Of many cases some exceed a limit by chance. Such a case is judged over so many times as many batches, and a drawn
# one, of which there are thousands, until it has more than LEAST_DRAWN: chance shrinks with them, a fault does not
AGAIN, LEAST_DRAWN = 4, 128
SLACK, PARAMETER_SLACK, LOSS_SLACK = 1.1, 1.25, 2.0
VERIFY_BOUND = 1e-4  # beyond which `fused_verify` warns in float32
LOSS_FLOOR = torch.finfo(torch.bfloat16).eps / 2


def float32_problems(case: Case, stock: Outcome, fused: Outcome, result: Result) -> list[str]:
    """Fill in the fused trainer's errors against stock, and say which are too large."""
    stock = with_metrics_of_others(case, stock, fused)
    errors = measure([stock], [fused], LOSS_SCALE if case.drawn else 0.0)
    result.loss_error, result.worst_parameter = errors.loss, errors.worst_parameter
    result.gradient_error = errors.parameters.get(errors.worst_parameter or "")
    problems = []
    if not errors.loss <= TOLERANCE:
        problems.append(f"loss off by {errors.loss:.1e}")
    if not (result.gradient_error or 0.0) <= TOLERANCE:
        problems.append(f"gradient of {result.worst_parameter} off by {result.gradient_error:.1e}")
    result.metrics_differ = differing_metrics(stock.metrics, fused.metrics)
    return problems + metric_problems(result)


def with_metrics_of_others(case: Case, stock: Outcome, fused: Outcome) -> Outcome:
    """
    Stock's outcome, with the fused trainer's metrics in the windows in which that left sequences out, as far as they
    then cover the others only: `entropy`, and those of vLLM's ratios where the training forward may give them. One that
    is no number is not taken over.
    """
    metrics = dict(stock.metrics)
    gives_ratios = case.fused.get("fused_skip_old_logps") is not False
    for name in [name for name in metrics if name == "entropy" or (gives_ratios and name.startswith("sampling/"))]:
        expected, own = metrics[name], fused.metrics.get(name, [])
        if len(expected) == len(own) == case.accumulation_windows:
            taken = [i in fused.leaves_out and math.isfinite(value) for i, value in enumerate(own)]
            metrics[name] = [own[i] if is_taken else expected[i] for i, is_taken in enumerate(taken)]
    return replace(stock, metrics=metrics)


def changed_problems(verified: Outcome, plain: Outcome) -> list[str]:
    """
    What `fused_verify` changes, though nothing may change, not even a bit.

    Args:
        verified ([`Outcome`]):
            Of the fused trainer with `fused_verify`.
        plain ([`Outcome`]):
            Of the same without.
    """
    changed = [name for name, tensor in plain.tensors.items() if not torch.equal(tensor, verified.tensors[name])]
    # As text, in which NaN equals NaN
    changed += [name for name, values in plain.metrics.items() if str(values) != str(verified.metrics.get(name))]
    changed += verified.metrics.keys() - plain.metrics.keys()
    if verified.loss != plain.loss:
        changed.append("loss")
    return [f"fused_verify changes {', '.join(changed)}"] if changed else []


def warning_problems(fused: Outcome) -> list[str]:
    """Whether `fused_verify` warned in float32, which is wrong where nothing is out of tolerance."""
    beyond = [error for error in fused.verified if not error <= VERIFY_BOUND]
    return [f"fused_verify warns of {beyond[0]:.1e}"] if beyond else []


def bfloat16_problems(errors: Errors, stock_errors: Errors, result: Result) -> list[str]:
    """Fill in the fused trainer's errors beside stock's, both against float64, and say which are too large."""
    result.loss_error, result.stock_loss_error = errors.loss, stock_errors.loss
    result.worst_parameter = _worst_relative_to_stock(errors, stock_errors)
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
    """Whether an error in bfloat16 is more than `slack` times stock's plus `floor`; NaN is."""
    return not error <= slack * stock_error + floor


def bfloat16_batches(case: Case) -> int:
    """How many batches are pooled in bfloat16: more where all tokens of a sequence share one weight and its error."""
    is_given = getattr(case.data, "old", None) or getattr(case.data, "sampling", None)
    of_sequences = (
        case.config.get("loss_type") == "vespo"
        or case.config.get("importance_sampling_level") == "sequence"
        or case.config.get("vllm_importance_sampling_mode", "").startswith("sequence")
    )
    return SEQUENCE_WEIGHT_BATCHES if is_given and of_sequences else BFLOAT16_BATCHES


def bfloat16_rounds(case: Case) -> list[int]:
    """Over how many batches a case is judged in bfloat16: the first, and where it exceeds a limit the next ones."""
    rounds = [bfloat16_batches(case)]
    while len(rounds) < 2 or (case.drawn and rounds[-1] <= LEAST_DRAWN):
        rounds.append(AGAIN * rounds[-1])
    return rounds


def _worst_relative_to_stock(errors: Errors, stock_errors: Errors) -> str | None:
    """The parameter that comes closest to its tolerance."""

    def ratio(name: str) -> float:
        value = errors.parameters[name] / (stock_errors.parameters[name] + TOLERANCE)
        return math.inf if math.isnan(value) else value

    return max(errors.parameters, key=ratio, default=None)


def metric_problems(result: Result) -> list[str]:
    return [f"metrics differ: {', '.join(result.metrics_differ)}"] if result.metrics_differ else []


def row_problems(case: Case, stock: Outcome, fused: Outcome, result: Result) -> list[str]:
    """Whether rows went through the fused function, and were recomputed where a forecast is wrong only."""
    if case.stepwise is not None and not fused.rows:
        return []  # TRL's own method may have been left to compute
    may_be_empty = any(getattr(case.data, name, ()) for name in ("empty_rows", "empty_micro_batches", "truncated_rows"))
    if case.mode == "train" and not fused.rows and not (case.drawn and (stock.norm == 0.0 or may_be_empty)):
        return ["no row went through the fused function"]
    if case.recomputed == "none" and result.recomputed:
        return [f"{result.recomputed:.1%} of rows recomputed, none expected"]
    if case.recomputed == "some" and not result.recomputed:
        return ["no row recomputed although the forecast was wrong"]
    return []
