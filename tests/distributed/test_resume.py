"""A training that was killed and goes on from its checkpoint is the one that was not, as far as stock's own is."""

import importlib.util
import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trl_fused_grpo.parity.tiny import save_checkpoint

from .batches import Batch
from .forked import QUICK, launch
from .resume_worker import CASES, LAUNCHES, LEARNING_RATE, SHARED, STEPS, Run


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LAUNCH_SECONDS = 1700
# What differs from run to run
_TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def _each(trainer: str, mode: str, where: Callable[[Run], bool] = lambda run: True) -> pytest.MarkDecorator:
    """Once for every run of this trainer and mode, where the condition holds."""
    needs_deepspeed = pytest.mark.skipif(not _HAS_DEEPSPEED, reason="DeepSpeed is not installed")
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(
                run,
                id=f"{launch_name}-{run.case}",
                marks=[
                    *([] if launch_name == QUICK else [pytest.mark.nightly]),
                    *([needs_deepspeed] if launch_name.startswith("zero") else []),
                ],
            )
            for launch_name, runs in LAUNCHES.items()
            for run in runs
            if (run.trainer, run.mode) == (trainer, mode) and where(run)
        ],
    )


class Outcome:
    """What a run left behind: exit codes, and unless it was killed its logs and parameters."""

    def __init__(self, folder: Path, run: Run):
        self.codes: list[int] = json.loads((folder / f"{run.name}.exit.json").read_text())["codes"]
        self.checkpoints = {int(path.name.split("-")[-1]) for path in (folder / run.name).glob("checkpoint-*")}
        written = folder / f"{run.name}.json"
        if any(self.codes):
            self.left_behind: dict[str, bool] = json.loads(written.read_text()) if run.mode == "killed" else {}
            return
        history: list[dict[str, Any]] = json.loads(written.read_text())
        self.logs = [
            {name: value for name, value in entry.items() if name not in _TIMES} for entry in history if "loss" in entry
        ]
        self.parameters: Batch = load_file(folder / f"{run.name}.safetensors")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of a launch starts all runs of it."""
    folder = tmp_path_factory.mktemp("resume")
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    start = cache(lambda name: launch("resume_worker", name, folder, LAUNCH_SECONDS))

    def of(run: Run, trainer: str | None = None, mode: str | None = None) -> Outcome:
        run = Run(run.backend, run.case, trainer or run.trainer, mode or run.mode)
        printed = start(next(name for name, runs in LAUNCHES.items() if run in runs))
        if not (folder / f"{run.name}.exit.json").exists():
            pytest.fail(f"{run.name} did not run:\n{printed[-6000:]}")
        result = Outcome(folder, run)
        if any(result.codes) and run.mode != "killed":
            end = printed.index(f"=== {run.name}: exit")
            pytest.fail(f"{run.name} ended with {result.codes}:\n{printed[end - 6000 : end]}")
        return result

    return of


def _is_same(first: Outcome, second: Outcome) -> bool:
    """Whether two trainings are equal to the bit, in logs and weights."""
    assert len(first.logs) == len(second.logs) == STEPS
    assert first.parameters.keys() == second.parameters.keys()
    same_weights = all(torch.equal(value, second.parameters[name]) for name, value in first.parameters.items())
    return first.logs == second.logs and same_weights


@_each("fused", "killed")
def test_the_process_is_killed_behind_its_last_checkpoint(run: Run, outcome):
    killed, case = outcome(run), CASES[run.case]
    assert killed.codes[-1] == -signal.SIGKILL
    assert all(killed.codes)
    assert max(killed.checkpoints) == case.checkpoint <= case.killed[0]
    if case.fused.keys() >= SHARED.keys():
        assert killed.left_behind["waits"] == case.loss_waits


@_each("fused", "resumed", where=lambda run: CASES[run.case].is_whole)
def test_a_resumed_training_is_to_the_bit_the_one_that_was_not_killed(run: Run, outcome):
    assert _is_same(outcome(run), outcome(run, mode="whole"))


@_each("stock", "resumed")
def test_stocks_own_is_where_no_generation_batch_is_in_use_at_the_checkpoint(run: Run, outcome):
    """TRL keeps no generation batch: it generates another one with the weights of the checkpoint."""
    assert _is_same(outcome(run), outcome(run, mode="whole")) == CASES[run.case].is_whole


@_each("fused", "resumed", where=lambda run: run not in LAUNCHES[QUICK])
def test_a_resumed_training_is_stocks_resumed_training(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    for mine, stocks in zip(fused.logs, stock.logs, strict=True):
        assert {name: mine[name] for name in stocks} == pytest.approx(stocks, rel=1e-4, abs=1e-5)
    for name, value in stock.parameters.items():
        # Adam makes steps of one size from gradients of any: where those of one weight are rounding, so are its steps
        longest_way = LEARNING_RATE * STEPS * value.numel() ** 0.5
        assert (fused.parameters[name] - value).norm() < 1e-4 * longest_way, name
