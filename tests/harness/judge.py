"""Says what is wrong with the single steps of a drawn case, beside what is wrong with those of a named one."""

import math
from dataclasses import replace

import torch

from trl_fused_grpo.parity.judge import AGAIN, NO_ROW, Result, bfloat16_batches, float32_problems

from . import census
from .case import Customisation, DrawnCase
from .steps import Outcome


# A smaller loss is a mean whose terms cancel. They move with log-probs of about -10, where float32 has steps of 1e-6,
# so that such a loss may differ by 1e-5 * LOSS_SCALE = 1e-6
LOSS_SCALE = 0.1
VERIFY_BOUND = 1e-4  # beyond which `fused_verify` warns in float32
# There are thousands of drawn cases: one that exceeds a limit in bfloat16 is judged over more batches until it has more
# than so many. Chance shrinks with them, a fault does not
LEAST_BATCHES = 128


def problems_of(case: DrawnCase, stock: Outcome, fused: Outcome, result: Result) -> list[str]:
    """Fill in the fused trainer's errors against stock in float32, and say which are too large."""
    return float32_problems(with_metrics_of_others(case, stock, fused), fused, result, LOSS_SCALE)


def with_metrics_of_others(case: DrawnCase, stock: Outcome, fused: Outcome) -> Outcome:
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
    Say what `fused_verify` changes: nothing may change, not even a bit.

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
    """Say if `fused_verify` warned in float32, which is wrong where nothing is out of tolerance."""
    beyond = [error for errors in fused.verified.values() for error in errors if not error <= VERIFY_BOUND]
    return [f"fused_verify warns of {beyond[0]:.1e}"] if beyond else []


def bfloat16_rounds(case: DrawnCase) -> list[int]:
    """Return over how many batches a case is judged: the first, and where it exceeds a limit the next ones."""
    rounds = [bfloat16_batches(case)]
    while rounds[-1] <= LEAST_BATCHES:
        rounds.append(AGAIN * rounds[-1])
    return rounds


def row_problems(case: DrawnCase, stock: Outcome, fused: Outcome) -> list[str]:
    """Say if no row went through the fused function, where some had to."""
    if case.customised != Customisation() or case.model.startswith(census.PREFIX):
        return []  # TRL's own method may have been left to compute
    may_be_empty = any(getattr(case.data, name, ()) for name in ("empty_rows", "empty_micro_batches", "truncated_rows"))
    return [NO_ROW] if case.mode == "train" and not fused.rows and stock.norm and not may_be_empty else []
