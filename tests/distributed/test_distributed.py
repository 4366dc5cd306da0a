"""FusedGRPOTrainer under DDP, FSDP and ZeRO: two processes train what stock trains, and what one process trains."""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from trl_fused_grpo._compat import trl as trl_compat

from . import batches
from .adapters import HEADS, TOGETHER, adapter, oracle
from .batches import Batch
from .engines import wrapper_and_parameters
from .outcomes import TOLERANCE, Outcome, close_to, distances_between, each_run, error_of, marks_of, outcomes, prepared
from .runs import ACCUMULATION, ARCHITECTURES, LAUNCHES, RANKS, REFUSED, SHARED, STEPS, Run
from .worker import build, train


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

_CLASSES = {
    "tied": "Qwen3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen3-vl": "Qwen3VLForConditionalGeneration",
}
_FLOAT32_CASES = ("untied", "tied", "reference", "lora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and micro-batches."""
    return prepared(tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of a launch starts the launch with all of its runs."""
    return outcomes(LAUNCHES, folder)


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Callable[[str], tuple[dict[str, Any], Batch]]:
    """What stock trains in this process on the rows of both ranks, from dense logits where it refuses the adapter."""

    @cache
    def of(case: str) -> tuple[dict[str, Any], Batch]:
        run = Run("none", case, oracle(case))
        union = batches.union(torch.load(folder / f"{run.model}.pt"))
        with mock.patch.dict(os.environ):  # the trainer leaves settings there
            return train(build(run, folder, union, use_cpu=True))

    return of


@each_run(("stock", "fused"))
def test_two_processes_train_under_the_wrapper_that_was_asked_for(run: Run, outcome):
    result = outcome(run)
    bare = _CLASSES.get(run.model, "LlamaForCausalLM")
    model = bare if adapter(run.case) is None else "PeftModelForCausalLM"
    wrapper, parameters = wrapper_and_parameters(run.backend, model)
    assert result.each_rank("world") == [RANKS] * RANKS
    assert result.each_rank("wrapper") == [wrapper] * RANKS
    assert result.each_rank("parameters") == [parameters] * RANKS


@each_run(("fused", "misled", "compiled"), *_FLOAT32_CASES)
def test_trains_what_stock_trains(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = distances_between(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == close_to(stocks["losses"])
        assert len(mine["logs"]) == len(stocks["logs"]) == STEPS
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            assert my_log.keys() - stock_log.keys() == {"fused/rows_recomputed"}
            expected = {name: value for name, value in stock_log.items() if name != "step_time"}
            assert {name: my_log[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@each_run(("compiled",))
def test_what_can_be_compiled_under_an_engine_is(run: Run, outcome):
    """FSDP1 and ZeRO-3 gather the weights of projections when these are called, FSDP2 those of a layer before it."""
    for calls in outcome(run).each_rank("compiled"):
        assert "eager" not in calls
        assert (calls.get("graphs", 0) > 0) == (run.backend in ("ddp", "fsdp2"))


@each_run(("verified",))
def test_a_comparison_with_trls_own_path_leaves_the_training_as_it_was(run: Run, outcome):
    """To the bit."""
    verified, fused = outcome(run), outcome(run, "fused")
    assert verified.moved.keys() == fused.moved.keys()
    assert all(torch.equal(moved, fused.moved[name]) for name, moved in verified.moved.items())
    for mine in verified.ranks:
        first, second, third = (entry.get("fused/verify_logps") for entry in mine["logs"])
        assert second is None and max(first, third) <= TOLERANCE


@each_run(("fused",), *ARCHITECTURES)
def test_an_architecture_trains_what_stock_trains(run: Run, outcome):
    """
    Also where processes have other numbers and lengths of sequences, or one of them has no image or no completion.
    Stock trains under DDP: the gradient of a composite model's head is another in stock under FSDP2.
    """
    fused, stock = outcome(run), outcome(Run("ddp", run.case, "stock"))
    distances = distances_between(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == close_to(stocks["losses"])
        if not run.case.startswith(("deaf", "wide")):
            assert (mine["layouts"], mine["warnings"]) == (["packed"] * len(mine["layouts"]), [])


@each_run(("fused",), "deaf", "deaf-holes")
def test_attention_of_unknown_code_has_padded_rows_on_all_processes(run: Run, outcome):
    for seen in outcome(run).ranks:
        assert seen["layouts"] == ["padded"] * (STEPS * ACCUMULATION)


@each_run(("fused",), "wide")
def test_rows_too_wide_on_one_process_have_the_layout_of_all(run: Run, outcome):
    """In layouts of their own they would call the model another number of times, and wait for one another."""
    layouts = ["packed"] * ACCUMULATION + ["padded"] * (STEPS - 1) * ACCUMULATION
    for seen in outcome(run).ranks:
        assert seen["layouts"] == layouts


@each_run(("fused",), SHARED)
def test_micro_batches_that_share_a_forward_train_what_stock_trains(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = distances_between(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == close_to(stocks["losses"])  # each in its own step
        waited = torch.tensor(mine["waited"]).view(STEPS, ACCUMULATION)
        assert waited[:, :-1].all()
        assert not waited[:, -1].any()
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            assert my_log.keys() - stock_log.keys() == {"fused/rows_recomputed"}
            assert my_log["fused/rows_recomputed"] == 0.0


@each_run(("fused",), "untied", "tied")
def test_gradients_are_those_of_all_rows(run: Run, outcome, one_process):
    """The rows of both ranks move every parameter, the head or the embedding tied to it among them."""
    seen, moved = one_process(run.case)
    fused = outcome(run)
    distances = distances_between(fused.moved, moved)
    assert ("model.embed_tokens.weight" if run.case == "tied" else "lm_head.weight") in distances
    assert max(distances.values()) <= TOLERANCE, distances
    assert torch.tensor(fused.each_rank("losses")).mean(0).tolist() == close_to(seen["losses"])


@each_run(("fused",), "shared-forward")
def test_gradients_are_reduced_and_weights_gathered_no_more_often_than_in_stock(run: Run, outcome):
    """Gradients once in an accumulation window, weights once for the forward that all share and its backward."""
    fused, stock = outcome(run).ranks[0]["collectives"], outcome(run, "stock").ranks[0]["collectives"]
    assert sum(stock.values()) > 0
    gathers, reduces = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
    if run.backend in ("fsdp2", "zero3"):
        assert fused[gathers] * ACCUMULATION == stock[gathers]
    if run.backend in ("fsdp1", "fsdp2"):
        assert fused[reduces] == stock[reduces]
    if run.backend == "zero3":  # which reduces with every backward
        assert fused[reduces] * ACCUMULATION == stock[reduces]
    if run.backend == "ddp":  # once more, the counts of recomputed rows
        assert fused["c10d::allreduce_"] == stock["c10d::allreduce_"] + 1


@each_run(("fused",), *HEADS)
def test_a_head_with_an_adapter_trains_as_in_one_process(run: Run, outcome, one_process):
    """PEFT's modules around the head gather what they hold, whichever of them the engine has wrapped."""
    seen, moved = one_process(run.case)
    fused = outcome(run)
    distances = distances_between(fused.moved, moved)
    parts = ["modules_to_save.default"] if HEADS[run.case].saved else ["lora_A.default", "lora_B.default"]
    assert [f"base_model.model.lm_head.{part}.weight" in distances for part in parts] == [True] * len(parts)
    assert max(distances.values()) <= TOLERANCE, distances
    assert torch.tensor(fused.each_rank("losses")).mean(0).tolist() == close_to(seen["losses"])


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=run.name, marks=marks_of(run)) for run in REFUSED if run.trainer == "fused"]
)
def test_what_an_engine_cannot_train_is_refused_in_the_constructor(run: Run, outcome):
    """Whichever the trainer: with logits in the place of the fused head it fails once training has started."""
    fields = pytest.importorskip("peft").LoraConfig.__dataclass_fields__
    if run.case in TOGETHER and "ensure_weight_tying" not in fields:
        pytest.skip("this PEFT does not tie adapters")
    if run.case == "saved-head-tied" and not trl_compat.FSDP2_FORBIDS_TIES_OF_HEADS:
        pytest.skip("torch and Accelerate take it")
    fused, stock = outcome(run), outcome(run, "dense")
    assert stock.each_rank("was_built") == [True] * RANKS
    assert fused.each_rank("was_built") == [False] * RANKS
    for error in fused.each_rank("error"):
        assert re.match(r"ValueError: the adapter on the output projection of \w+ cannot train: .*FSDP.*: .", error)


@each_run(("fused",), "reference")
def test_old_and_reference_log_probs_agree_with_stock(run: Run, outcome):
    """Forwards without gradient, of the policy and of a reference model that is wrapped on its own."""
    for mine, stocks in zip(*(outcome(run, t).each_rank("logps") for t in ("fused", "stock")), strict=True):
        assert len(mine) == STEPS * ACCUMULATION
        for my_logps, stock_logps in zip(mine, stocks, strict=True):
            torch.testing.assert_close(
                torch.tensor(my_logps), torch.tensor(stock_logps), rtol=TOLERANCE, atol=TOLERANCE
            )
        first_old, first_reference = torch.tensor(mine[0])
        assert torch.equal(first_old, first_reference)
        # The policy has moved since, the reference has not
        old, reference = torch.tensor(mine[ACCUMULATION + 1])
        assert not torch.equal(old, reference)


@each_run(("fused",), "bf16")
def test_mixed_precision_leaves_log_probs_in_float32(run: Run, outcome, one_process):
    """Accelerate has FSDP2 round what a forward returns. Rounded gradients would also differ from the forecast."""
    _, truth = one_process(run.case)
    fused, stock = outcome(run), outcome(run, "stock")
    policy_and_reference = torch.tensor(fused.ranks[0]["logps"][0])
    assert not torch.equal(policy_and_reference, policy_and_reference.bfloat16().float())
    recomputed, rows = torch.tensor(fused.each_rank("recomputed")).sum((0, 1)).tolist()
    assert recomputed / rows < 0.05
    assert error_of(fused.moved, truth) < 1.1 * error_of(stock.moved, truth)


@each_run(("fused",), "untied", "tied", "lora", *HEADS)
def test_a_right_forecast_recomputes_nothing(run: Run, outcome):
    for rank, counts in enumerate(outcome(run).each_rank("recomputed")):
        assert all(recomputed == 0 for recomputed, _ in counts)
        assert all((rows == 0) == ((rank, i) in batches.MASKED) for i, (_, rows) in enumerate(counts))


@each_run(("misled",))
def test_a_wrong_forecast_costs_the_rank_that_has_it(run: Run, outcome):
    right, wrong = outcome(run).each_rank("recomputed")
    assert all(recomputed == 0 for recomputed, _ in right)
    assert all(0 < recomputed < rows for recomputed, rows in wrong if rows)


@each_run(("fused", "misled"))
def test_the_fraction_of_recomputed_rows_is_the_same_on_every_rank(run: Run, outcome):
    result = outcome(run)
    recomputed, rows = torch.tensor(result.each_rank("recomputed"), dtype=torch.float64).sum(0).unbind(-1)
    # Nothing is logged for a micro-batch that waits
    expected = (recomputed / rows).view(STEPS, ACCUMULATION).nanmean(1).tolist()
    for logs in result.each_rank("logs"):
        assert [entry["fused/rows_recomputed"] for entry in logs] == pytest.approx(expected)
