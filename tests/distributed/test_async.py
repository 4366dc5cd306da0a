"""`AsyncGRPOTrainer` under DDP and FSDP2: two processes with rows of their own train and log what stock does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.parity.tiny import save_checkpoint

from .batches import Batch
from .outcomes import each_forked, error_of, forked_outcomes


if TRL < NEWEST_TRL:
    pytest.skip("earlier releases have none, or another one", allow_module_level=True)

from .async_worker import LAUNCHES, Run


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[list[Any], Batch]]:
    folder = tmp_path_factory.mktemp("async")
    outcome = forked_outcomes("async_worker", LAUNCHES, folder, 1700)
    for kind in {run.kind for runs in LAUNCHES.values() for run in runs}:
        save_checkpoint(kind, folder, torch.float32)
    return outcome


@each_forked(LAUNCHES)
def test_ten_steps_are_those_of_stock(run: Run, outcome):
    (logs, moved), (stock_logs, stock_moved) = outcome(run), outcome(replace(run, trainer="stock"))
    assert moved.keys() == stock_moved.keys()
    way = sum(value.square().sum().item() for value in stock_moved.values()) ** 0.5
    assert error_of(moved, stock_moved) < 3e-5 * way
    for log, stock_log in zip(logs, stock_logs, strict=True):
        assert len(log) == len(stock_log) == 11
        for entry, expected in zip(log, stock_log, strict=True):
            numbers = {name: value for name, value in expected.items() if value is not None}
            assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
