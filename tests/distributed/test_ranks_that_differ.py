"""Processes that have no tokens, many more or a wrong forecast train what stock trains, and none hangs."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trl_fused_grpo.parity.tiny import save_checkpoint

from .batches import Batch
from .forked import launch
from .ranks_worker import LAUNCHES, Run, micro_batches
from .runs import ACCUMULATION, RANKS, STEPS


pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(1800)]

TOLERANCE = 1e-5  # relative, float32
LAUNCH_SECONDS = 1500
_TIMES = {"step_time"}  # differ from run to run
_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def _each(*trainers: str, where: Callable[[Run], bool] = lambda run: True) -> pytest.MarkDecorator:
    """Once for every run of these trainers, of any if none is given, where the condition holds."""
    needs_deepspeed = pytest.mark.skipif(not _HAS_DEEPSPEED, reason="DeepSpeed is not installed")
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(run, id=run.name, marks=needs_deepspeed if backend.startswith("zero") else ())
            for backend, runs in LAUNCHES.items()
            for run in runs
            if run.trainer in (trainers or (run.trainer,)) and where(run)
        ],
    )


class Outcome:
    """What a run left behind."""

    def __init__(self, folder: Path, run: Run, printed: str):
        self.printed = printed
        ended: dict[str, Any] = json.loads((folder / f"{run.name}.exit.json").read_text())
        self.codes, self.seconds = ended["codes"], ended["seconds"]
        self.ranks: list[dict[str, Any]] = []
        self.moved: Batch = {}
        if not any(self.codes):
            self.ranks = [json.loads((folder / f"{run.name}.{rank}.json").read_text()) for rank in range(RANKS)]
            self.moved = load_file(folder / f"{run.name}.safetensors")

    def each_rank(self, key: str) -> list[Any]:
        return [rank[key] for rank in self.ranks]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of an engine starts all runs of this engine."""
    folder = tmp_path_factory.mktemp("ranks")
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    for case in {run.data for runs in LAUNCHES.values() for run in runs}:
        torch.save(micro_batches(case, folder), folder / f"{case}.pt")
    start = cache(lambda backend: launch("ranks_worker", backend, folder, LAUNCH_SECONDS))

    def of(run: Run, trainer: str | None = None) -> Outcome:
        run = Run(run.backend, run.case, trainer or run.trainer)
        printed = start(run.backend)
        if not (folder / f"{run.name}.exit.json").exists():
            pytest.fail(f"{run.name} did not run:\n{printed[-6000:]}")
        end = printed.index(f"=== {run.name}: exit")
        result = Outcome(folder, run, printed[printed.rfind("\n=== ", 0, end) + 1 : end])
        if any(result.codes):
            pytest.fail(f"{run.name} ended with {result.codes}:\n{result.printed[-6000:]}")
        return result

    return of


def _distances(fused: Batch, stock: Batch) -> dict[str, float]:
    """Distance between each parameter's two movements, relative to the movement."""
    moved = {name for name, value in stock.items() if value.any()}
    assert moved
    assert fused.keys() == stock.keys()
    assert not any(fused[name].any() for name in fused.keys() - moved)
    return {name: ((fused[name] - stock[name]).norm() / stock[name].norm()).item() for name in moved}


def _close(losses: list[float]) -> Any:
    return pytest.approx(losses, abs=TOLERANCE * max(map(abs, losses)))


@_each(where=lambda run: run.trainer != "stock")
def test_trains_and_logs_what_stock_does(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = _distances(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["world"] == RANKS
        assert mine["losses"] == _close(stocks["losses"])
        assert len(mine["logs"]) == len(stocks["logs"]) == STEPS
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            left_out = _TIMES | ({"entropy"} if run.trainer == "skipping" else set())  # of other sequences
            expected = {name: value for name, value in stock_log.items() if name not in left_out}
            numbers = {name: value for name, value in expected.items() if value is not None}  # of no token
            assert not any(my_log[name] for name in expected.keys() - numbers.keys())
            assert {name: my_log[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@_each("shared", "skipping", "misled")
def test_micro_batches_share_forwards_on_all_processes(run: Run, outcome):
    for waited in outcome(run).each_rank("waited"):
        assert waited == ([True] * (ACCUMULATION - 1) + [False]) * STEPS


@_each("misled")
def test_a_wrong_forecast_is_recomputed_where_it_was_made(run: Run, outcome):
    right, wrong = outcome(run).each_rank("recomputed")
    assert not any(recomputed for recomputed, _ in right)
    assert any(recomputed for recomputed, _ in wrong)
