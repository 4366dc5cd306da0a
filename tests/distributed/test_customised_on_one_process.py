"""
A hook, a callback or a method of one process alone: all processes leave the faster path together, none waits for what
the other does not do, and they train what stock trains.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trl_fused_grpo.parity.tiny import save_checkpoint

from .customised_worker import ACCUMULATION, LAUNCHES, QUICK, RANKS, Run
from .engines import wrapper_and_parameters
from .forked import launch
from .outcomes import NEEDS_DEEPSPEED, distances_between


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TOLERANCE = 1e-5  # relative, float32
LAUNCH_SECONDS = 800
# What each micro-batch has a forward of its own with, of which all processes count as many
SEPARATING = ("gradients", "callback", "method")
_ADDED = ("fused/rows_recomputed", "fused/verify_loss", "fused/verify_head_grad")


def _each(*cases: str) -> pytest.MarkDecorator:
    """Once for every fused run with these customisations, or with any."""
    return pytest.mark.parametrize(
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
            if run.trainer == "fused" and run.customisation in (cases or (run.customisation,))
        ],
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[list[dict[str, Any]], Any]]:
    """What each rank of a run saw, and how far parameters moved. The first run of a launch starts all of them."""
    folder = tmp_path_factory.mktemp("customised")
    save_checkpoint("llama", folder, torch.float32).rename(folder / "llama")
    start = cache(lambda name: launch("customised_worker", name, folder, LAUNCH_SECONDS))

    def of(run: Run) -> tuple[list[dict[str, Any]], Any]:
        printed = start(next(name for name, runs in LAUNCHES.items() if run in runs))
        end = folder / f"{run.name}.exit.json"
        if not end.exists() or any(json.loads(end.read_text())["codes"]):
            place = printed.find(f"=== {run.name}\n")
            pytest.fail(f"{run.name} failed:\n{printed[place : place + 6000]}")
        ranks = [json.loads((folder / f"{run.name}.{rank}.json").read_text()) for rank in range(RANKS)]
        return ranks, load_file(folder / f"{run.name}.safetensors")

    return of


@_each()
def test_it_trains_and_logs_as_stock(run: Run, outcome):
    ranks, moved = outcome(run)
    stock_ranks, stock_moved = outcome(replace(run, case="nothing", trainer="stock"))
    distances = distances_between(moved, stock_moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(ranks, stock_ranks, strict=True):
        assert mine["world"] == RANKS
        assert mine["wrapper"] == wrapper_and_parameters(run.backend, "LlamaForCausalLM")[0]
        assert len(mine["logs"]) == len(stocks["logs"]) == run.windows
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            numbers = {name: value for name, value in stock_log.items() if name != "step_time"}
            assert {name: my_log[name] for name in numbers} == pytest.approx(numbers, rel=2e-4, abs=1e-6)
            assert my_log.keys() - {*_ADDED} == stock_log.keys()


@_each()
def test_all_processes_have_the_same_forwards_and_layout(run: Run, outcome):
    ranks, _ = outcome(run)
    assert ranks[0]["forwards"] == ranks[1]["forwards"]
    is_hooked = run.customisation in ("module", "wrapper", "head")
    assert ranks[0]["layout"] == ranks[1]["layout"] == ("padded" if is_hooked else "packed")
    if run.customisation == "nothing" and not run.verifies:
        assert sum(ranks[0]["forwards"]) == run.windows  # one for each, shared


@_each(*SEPARATING)
def test_no_process_shares_the_forward_of_a_micro_batch_that_one_may_see(run: Run, outcome):
    if run.backend == "fsdp2" and run.case.startswith("gradients") and "later" not in run.case:
        pytest.skip("FSDP2 makes parameters of its own, without the hook")
    ranks, _ = outcome(run)
    verified = run.windows if run.verifies and run.customisation != "gradients" else 0  # whose backward it would see
    assert sum(ranks[0]["forwards"]) == run.windows * ACCUMULATION + verified


@_each()
def test_an_engine_that_gathers_weights_is_not_taken_for_a_reward_function_that_moves_them(run: Run, outcome):
    ranks, _ = outcome(run)
    moves = [run.customisation == "weights" and rank == run.customised_rank for rank in range(RANKS)]
    assert [seen["moved_by"] is not None for seen in ranks] == moves


@_each("weights")
def test_all_processes_compute_log_probs_in_generation_once_a_reward_function_of_one_moves_weights(run: Run, outcome):
    ranks, _ = outcome(run)
    others, _ = outcome(replace(run, case="nothing"))
    for seen, plain in zip(ranks, others, strict=True):
        # In each micro-batch, instead of in the one forward of those that are trained on with other weights
        assert seen["forwards"].count(False) == plain["forwards"].count(False) + 2 * ACCUMULATION - 1
