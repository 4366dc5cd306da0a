"""
A hook, a callback or a method of one process alone: all processes leave the faster path together, none waits for what
the other does not do, and they train what stock trains.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .customised_worker import ACCUMULATION, LAUNCHES, RANKS, Run
from .engines import wrapper_and_parameters
from .outcomes import distances_between, each_forked, forked_outcomes


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

TOLERANCE = 1e-5  # relative, float32
LAUNCH_SECONDS = 1700
# What each micro-batch has a forward of its own with, of which all processes count as many
SEPARATING = ("gradients", "callback", "method")
_ADDED = ("fused/rows_recomputed", "fused/verify_logps")


def _each(*cases: str) -> pytest.MarkDecorator:
    """Once for every fused run with these customisations, or with any."""
    return each_forked(LAUNCHES, lambda run: run.customisation in (cases or (run.customisation,)))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[list[dict[str, Any]], Any]]:
    return forked_outcomes("customised_worker", LAUNCHES, tmp_path_factory.mktemp("customised"), LAUNCH_SECONDS)


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
    is_hooked = run.customisation in ("module", "wrapper", "head", "reference", "own-class")
    assert ranks[0]["layout"] == ranks[1]["layout"] == ("padded" if is_hooked else "packed")
    if run.customisation == "nothing" and not run.verifies:
        assert sum(ranks[0]["forwards"]) == run.windows  # one for each, shared


@_each(*SEPARATING)
def test_no_process_shares_the_forward_of_a_micro_batch_that_one_may_see(run: Run, outcome):
    if run.backend == "fsdp2" and run.case.startswith("gradients") and "later" not in run.case:
        pytest.skip("FSDP2 makes parameters of its own, without the hook")
    ranks, _ = outcome(run)
    assert sum(ranks[0]["forwards"]) == run.windows * ACCUMULATION


@_each()
def test_an_engine_that_gathers_weights_is_not_taken_for_a_reward_function_that_moves_them(run: Run, outcome):
    ranks, _ = outcome(run)
    moves = [run.customisation == "weights" and rank == run.customised_rank for rank in range(RANKS)]
    assert [seen["moves"] for seen in ranks] == moves


@_each("weights")
def test_all_processes_compute_log_probs_in_generation_once_a_reward_function_of_one_moves_weights(run: Run, outcome):
    ranks, _ = outcome(run)
    others, _ = outcome(replace(run, case="nothing"))
    for seen, plain in zip(ranks, others, strict=True):
        # Two generations, in each a forward for every micro-batch: of the first one after its reward function.
        # Beside them those that are compared with TRL's own
        compared = run.windows if run.verifies else 1
        assert seen["forwards"].count(False) == 2 * 2 * ACCUMULATION + compared
        assert plain["forwards"].count(False) < seen["forwards"].count(False)
