"""
An accumulation window with two forwards, because a third micro-batch is too much for the limit of tokens. Gradients
are reduced, and weights gathered, no more often than in stock, and two processes train what stock trains.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trl_fused_grpo.parity.tiny import save_checkpoint

from . import batches
from .outcomes import NEEDS_DEEPSPEED, TOLERANCE, Outcome, close_to, distances_between, outcomes
from .runs import ACCUMULATION, LENGTHS_OF_TWO, NIGHTLY_LAUNCHES, RANKS, STEPS, TWICE, Run


pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(1800)]

FORWARDS = 2  # of a window
GATHERS, REDUCES, ALL_REDUCES = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"

_EACH = pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run.name, marks=NEEDS_DEEPSPEED if run.backend.startswith("zero") else ())
        for runs in NIGHTLY_LAUNCHES.values()
        for run in runs
        if run.trainer == "fused"
    ],
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of a launch starts the launch with all of its runs."""
    folder: Path = tmp_path_factory.mktemp("two-forwards")
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    window = FORWARDS * ACCUMULATION
    made = batches.make(folder / "llama", (LENGTHS_OF_TWO,) * RANKS, masked=(), accumulation=window)
    torch.save(made, folder / f"{TWICE}.pt")
    return outcomes(NIGHTLY_LAUNCHES, folder)


@_EACH
def test_a_window_with_two_forwards_trains_what_stock_trains(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = distances_between(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == close_to(stocks["losses"])
        assert mine["waited"] == ([True] * (ACCUMULATION - 1) + [False]) * FORWARDS * STEPS
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            assert my_log["fused/rows_recomputed"] == 0.0


@_EACH
def test_gradients_are_reduced_and_weights_gathered_no_more_often_than_in_stock(run: Run, outcome):
    """Gradients once in a window, with the backward of its last forward; weights once for each of the two forwards."""
    for mine, stocks in zip(outcome(run).ranks, outcome(run, "stock").ranks, strict=True):
        fused, stock = mine["collectives"], stocks["collectives"]
        if run.backend in ("fsdp2", "zero3"):
            assert fused[GATHERS] * ACCUMULATION == stock[GATHERS] > 0
        if run.backend in ("fsdp1", "fsdp2"):
            assert fused[REDUCES] == stock[REDUCES] > 0
        if run.backend == "zero3":  # which reduces with every backward
            assert fused[REDUCES] * ACCUMULATION == stock[REDUCES] > 0
        saved = FORWARDS * (ACCUMULATION - 1) if run.backend == "zero2" else 0  # it reduces with every backward, too
        assert fused[ALL_REDUCES] == stock[ALL_REDUCES] - saved + 1  # once more, the counts of recomputed rows
