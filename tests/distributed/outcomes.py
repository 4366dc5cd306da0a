"""What two processes train on, what their runs leave behind, and how far two of those are apart."""

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

from . import architectures, batches, forked
from .batches import Batch
from .launching import launch
from .runs import ARCHITECTURES, LAUNCHES, QUICK_RUNS, RANKS, REFUSED, Run


TOLERANCE = 1e-5  # relative, float32

_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NEEDS_DEEPSPEED = pytest.mark.skipif(not _HAS_DEEPSPEED, reason="DeepSpeed is not installed")


def marks_of(run: Run) -> list[pytest.MarkDecorator]:
    """Nightly, but for the quick runs."""
    needs = [NEEDS_DEEPSPEED] if run.backend.startswith("zero") else []
    return needs if run in QUICK_RUNS else [*needs, pytest.mark.nightly]


def each_run(trainers: tuple[str, ...], *cases: str) -> pytest.MarkDecorator:
    """Once for every run of these trainers and cases, or of any case."""
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(run, id=run.name, marks=marks_of(run))
            for runs in LAUNCHES.values()
            for run in runs
            if run.trainer in trainers and run.case in (cases or (run.case,)) and run not in REFUSED
        ],
    )


def prepared(folder: Path) -> Path:
    """The folder with checkpoints and micro-batches."""
    for model in ("llama", "tied"):
        save_checkpoint(model, folder, torch.float32).rename(folder / model)
        torch.save(batches.make(folder / model), folder / f"{model}.pt")
    torch.save(batches.make(folder / "llama", lengths=((2, 5), (9, 16))), folder / "unequal.pt")
    for case, model in ARCHITECTURES.items():
        if not (folder / model).exists():
            save_checkpoint(model, folder, torch.float32).rename(folder / model)
        torch.save(architectures.micro_batches(case), folder / f"{case}.pt")
    return folder


class Outcome:
    """What a run left behind."""

    def __init__(self, folder: Path, run: Run):
        self.ranks: list[dict[str, Any]] = json.loads((folder / f"{run.name}.json").read_text())
        self.moved: Batch = load_file(folder / f"{run.name}.safetensors")

    def each_rank(self, key: str) -> list[Any]:
        return [rank[key] for rank in self.ranks]


def outcomes(launches: dict[str, list[Run]], folder: Path) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of a launch starts the launch with all of its runs."""
    start = cache(lambda name: launch(["tests.distributed.worker", name, str(folder)], RANKS))

    def of(run: Run, trainer: str | None = None) -> Outcome:
        run = Run(run.backend, run.case, trainer or run.trainer)
        printed = start(next(name for name, runs in launches.items() if run in runs))
        if not (folder / f"{run.name}.json").exists():
            pytest.fail(f"{run.name} did not finish:\n{printed[-6000:]}")
        return Outcome(folder, run)

    return of


def each_forked(launches: dict[str, list[Any]], where: Callable[[Any], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Once for every fused run of a worker of [`forked`] where a condition holds: nightly, but for the quick launch."""
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(
                run,
                id=run.name,
                marks=[
                    *([] if name == forked.QUICK else [pytest.mark.nightly]),
                    *([NEEDS_DEEPSPEED] if run.backend.startswith("zero") else []),
                ],
            )
            for name, runs in launches.items()
            for run in runs
            if run.trainer == "fused" and where(run)
        ],
    )


def forked_outcomes(
    worker: str, launches: dict[str, list[Any]], folder: Path, seconds: float
) -> Callable[[Any], tuple[list[dict[str, Any]], Batch]]:
    """
    What each rank of a run saw, and how far parameters moved. The first run of a launch starts all of them.

    Args:
        worker, launches: see [`forked.launch`].
        folder (`Path`): gets the checkpoint `llama`, and what runs leave.
        seconds (`float`): after which a launch is ended.
    """
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    start = cache(lambda name: forked.launch(worker, name, folder, seconds))

    def of(run: Any) -> tuple[list[dict[str, Any]], Batch]:
        printed = start(next(name for name, runs in launches.items() if run in runs))
        end = folder / f"{run.name}.exit.json"
        if not end.exists() or any(json.loads(end.read_text())["codes"]):
            place = printed.find(f"=== {run.name}\n")
            pytest.fail(f"{run.name} failed:\n{printed[place : place + 6000]}")
        ranks = [json.loads((folder / f"{run.name}.{rank}.json").read_text()) for rank in range(RANKS)]
        return ranks, load_file(folder / f"{run.name}.safetensors")

    return of


def distances_between(fused: Batch, stock: Batch) -> dict[str, float]:
    """Distance between each parameter's two movements, relative to the movement."""
    assert {name: value.shape for name, value in fused.items()} == {name: value.shape for name, value in stock.items()}
    moved = {name for name, value in stock.items() if value.any()}
    assert moved
    assert not any(fused[name].any() for name in fused.keys() - moved)
    return {name: ((fused[name] - stock[name]).norm() / stock[name].norm()).item() for name in moved}


def error_of(moved: Batch, truth: Batch) -> float:
    """Distance of all parameters together."""
    return sum((moved[name] - value).square().sum().item() for name, value in truth.items()) ** 0.5


def close_to(losses: list[float]) -> Any:
    """Positive and negative terms of a loss cancel, so the largest loss gives the size of the rounding error."""
    return pytest.approx(losses, abs=TOLERANCE * max(map(abs, losses)))
