"""Trainings drawn at random in two processes, whose completions have other lengths, train and log what stock does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from .batches import Batch
from .drawn_worker import LAUNCHES, Run, draw
from .outcomes import each_forked, error_of, forked_outcomes


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="other releases draw completions elsewhere"),
]

# Relative, of all parameters together in float32. Policy and reference are equal at first, so that the gradient of KL
# is rounding there, which later steps carry on: stock's as well
TOLERANCE = 1e-4
LAUNCH_SECONDS = 1700


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[list[dict[str, Any]], Batch]]:
    return forked_outcomes("drawn_worker", LAUNCHES, tmp_path_factory.mktemp("drawn"), LAUNCH_SECONDS)


@each_forked(LAUNCHES)
def test_it_trains_and_logs_as_stock(run: Run, outcome):
    (ranks, moved), (stock_ranks, stock_moved) = outcome(run), outcome(replace(run, trainer="stock"))
    assert moved.keys() == stock_moved.keys()
    way = error_of({name: torch.zeros_like(value) for name, value in stock_moved.items()}, stock_moved)
    assert way > 0
    assert error_of(moved, stock_moved) < TOLERANCE * way, draw(run.index)
    for logs, stock_logs in ((seen["logs"], stocks["logs"]) for seen, stocks in zip(ranks, stock_ranks, strict=True)):
        assert len(logs) == len(stock_logs) > 0
        for entry, stock_entry in zip(logs, stock_logs, strict=True):
            expected = {name: value for name, value in stock_entry.items() if name != "step_time"}
            numbers = {name: value for name, value in expected.items() if value is not None}  # of no completion
            assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5, nan_ok=True)
            assert all(entry[name] is None for name in expected.keys() - numbers.keys())
