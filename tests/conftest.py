"""Settings for every test: no hub, no telemetry, one seed, and which tests run where."""

import gc
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path


# before transformers is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch


HERE = Path(__file__).parent
# They import torch alone of the libraries that differ between the environments of TRL's releases, or none.
# Tests of FusedLinearGRPOLoss are not among them: they depend on Liger, of which each release has the one of its time.
# Benchmarks, the census and the docs are about the newest; how cases share processes is the same on all.
ANY_TRL = [
    HERE / name
    for name in (
        *("ops", "loss/test_objective.py", "test_architecture.py", "test_versions.py"),
        *("test_benchmark_records.py", "test_census.py", "test_learning.py"),
        *("parity/test_harness_command.py", "parity/test_jobs.py", "parity/test_random_trainings.py"),
    )
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the newest TRL is enough for, and as nightly the cases that `sample` leaves out."""
    sampled = defaultdict(list)
    for item in items:
        if any(item.path.is_relative_to(path) for path in ANY_TRL):
            item.add_marker(pytest.mark.any_trl)
        if item.get_closest_marker("sample") and not item.get_closest_marker("nightly"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        [count] = cases[0].get_closest_marker("sample").args
        # The first, the last and some between: steps of this length go through every parameter of a grid
        kept = {place * (len(cases) - 1) // max(count - 1, 1) for place in range(max(count, 1))}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker(pytest.mark.nightly)


def pytest_collection_finish() -> None:
    """
    Leave what is imported out of garbage collection: Accelerate collects at the start of each training, and looking
    through torch and transformers takes more time than a tiny model's training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def whole_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4 logs losses with four decimals, in which equal ones may differ. Here it logs all digits."""
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        monkeypatch.setattr(trainer, "round", lambda value, digits=None: value, raising=False)


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """One seed, and no mixed precision left over: transformers 4 hands it on to later arguments in the environment."""
    torch.manual_seed(0)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(autouse=True)
def warnings_are_new() -> None:
    """transformers' `warning_once` says a sentence once in a process. Here each test may be the first to hear it."""
    said = getattr(logging.Logger, "warning_once", None)
    if said is not None:
        said.cache_clear()
