"""Trainings drawn at random in two processes, whose completions have other lengths, train and log what stock does."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.parity.tiny import save_checkpoint

from .batches import Batch
from .drawn_worker import LAUNCHES, QUICK, RANKS, Run, draw
from .forked import launch
from .outcomes import NEEDS_DEEPSPEED


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="other releases draw completions elsewhere"),
]

# Relative, of all parameters together in float32. Policy and reference are equal at first, so that the gradient of KL
# is rounding there, which later steps carry on: stock's as well
TOLERANCE = 1e-4
LAUNCH_SECONDS = 800

_EACH = pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run,
            id=run.name,
            marks=[
                *([] if name == QUICK else [pytest.mark.nightly]),
                *([NEEDS_DEEPSPEED] if run.backend.startswith("zero") else []),
            ],
        )
        for name, runs in LAUNCHES.items()
        for run in runs
        if run.trainer == "fused"
    ],
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[list[dict[str, Any]], Batch]]:
    """What each rank logged, and how far parameters moved. The first run of a launch starts all of them."""
    folder: Path = tmp_path_factory.mktemp("drawn")
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    start = cache(lambda name: launch("drawn_worker", name, folder, LAUNCH_SECONDS))

    def of(run: Run) -> tuple[list[dict[str, Any]], Batch]:
        printed = start(next(name for name, runs in LAUNCHES.items() if run in runs))
        end = folder / f"{run.name}.exit.json"
        if not end.exists() or any(json.loads(end.read_text())["codes"]):
            place = printed.find(f"=== {run.name}\n")
            pytest.fail(f"{run.name} failed, {draw(run.index)}:\n{printed[place : place + 6000]}")
        logs = [json.loads((folder / f"{run.name}.{rank}.json").read_text())["logs"] for rank in range(RANKS)]
        return logs, load_file(folder / f"{run.name}.safetensors")

    return of


@_EACH
def test_it_trains_and_logs_as_stock(run: Run, outcome):
    (ranks, moved), (stock_ranks, stock_moved) = outcome(run), outcome(replace(run, trainer="stock"))
    assert moved.keys() == stock_moved.keys()
    distance, way = (
        torch.stack([value.norm() for value in values]).norm()
        for values in ([moved[name] - value for name, value in stock_moved.items()], stock_moved.values())
    )
    assert way > 0
    assert distance < TOLERANCE * way, draw(run.index)
    for logs, stock_logs in zip(ranks, stock_ranks, strict=True):
        assert len(logs) == len(stock_logs) > 0
        for entry, stock_entry in zip(logs, stock_logs, strict=True):
            expected = {name: value for name, value in stock_entry.items() if name != "step_time"}
            numbers = {name: value for name, value in expected.items() if value is not None}  # of no completion
            assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5, nan_ok=True)
            assert all(entry[name] is None for name in expected.keys() - numbers.keys())
