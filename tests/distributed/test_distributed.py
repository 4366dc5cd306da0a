"""FusedGRPOTrainer under DDP, FSDP and ZeRO: two processes train what stock trains, and what one process trains."""

import importlib.util
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.tiny import save_checkpoint

from . import architectures, batches
from .adapters import HEADS, TOGETHER, adapter, oracle
from .batches import Batch
from .engines import wrapper_and_parameters
from .launching import launch
from .runs import ACCUMULATION, ARCHITECTURES, LAUNCHES, RANKS, REFUSED, SHARED, STEPS, Run
from .worker import build, train


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

TOLERANCE = 1e-5  # relative, float32

_CLASSES = {
    "tied": "Qwen3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen3-vl": "Qwen3VLForConditionalGeneration",
}
_FLOAT32_CASES = ("untied", "tied", "reference", "lora")

_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
_NEEDS_DEEPSPEED = pytest.mark.skipif(not _HAS_DEEPSPEED, reason="DeepSpeed is not installed")


def _each(trainers: tuple[str, ...], *cases: str) -> pytest.MarkDecorator:
    """Once for every run of these trainers and cases, or of any case."""
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(run, id=run.name, marks=_NEEDS_DEEPSPEED if name == "deepspeed" else ())
            for name, runs in LAUNCHES.items()
            for run in runs
            if run.trainer in trainers and run.case in (cases or (run.case,)) and run not in REFUSED
        ],
    )


class Outcome:
    """What a run left behind."""

    def __init__(self, folder: Path, run: Run):
        self.ranks: list[dict[str, Any]] = json.loads((folder / f"{run.name}.json").read_text())
        self.moved: Batch = load_file(folder / f"{run.name}.safetensors")

    def each_rank(self, key: str) -> list[Any]:
        return [rank[key] for rank in self.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and micro-batches."""
    folder = tmp_path_factory.mktemp("distributed")
    for model in ("llama", "tied"):
        save_checkpoint(model, folder, torch.float32).rename(folder / model)
        torch.save(batches.make(folder / model), folder / f"{model}.pt")
    torch.save(batches.make(folder / "llama", lengths=((2, 5), (9, 16))), folder / "exchanged.pt")
    for case, model in ARCHITECTURES.items():
        if not (folder / model).exists():
            save_checkpoint(model, folder, torch.float32).rename(folder / model)
        torch.save(architectures.micro_batches(case), folder / f"{case}.pt")
    return folder


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Callable[..., Outcome]:
    """Outcome of one run. The first one of a launch starts the launch with all of its runs."""
    start = cache(lambda name: launch(["tests.distributed.worker", name, str(folder)], RANKS))

    def of(run: Run, trainer: str | None = None) -> Outcome:
        run = Run(run.backend, run.case, trainer or run.trainer)
        printed = start(next(name for name, runs in LAUNCHES.items() if run in runs))
        if not (folder / f"{run.name}.json").exists():
            pytest.fail(f"{run.name} did not finish:\n{printed[-6000:]}")
        return Outcome(folder, run)

    return of


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


def _distances(fused: Batch, stock: Batch) -> dict[str, float]:
    """Distance between each parameter's two movements, relative to the movement."""
    assert {name: value.shape for name, value in fused.items()} == {name: value.shape for name, value in stock.items()}
    moved = {name for name, value in stock.items() if value.any()}
    assert moved
    assert not any(fused[name].any() for name in fused.keys() - moved)
    return {name: ((fused[name] - stock[name]).norm() / stock[name].norm()).item() for name in moved}


def _error(moved: Batch, truth: Batch) -> float:
    return sum((moved[name] - value).square().sum().item() for name, value in truth.items()) ** 0.5


def _close(losses: list[float]) -> Any:
    """Positive and negative terms of a loss cancel, so the largest loss gives the size of the rounding error."""
    return pytest.approx(losses, abs=TOLERANCE * max(map(abs, losses)))


@_each(("stock", "fused"))
def test_two_processes_train_under_the_wrapper_that_was_asked_for(run: Run, outcome):
    result = outcome(run)
    bare = _CLASSES.get(run.model, "LlamaForCausalLM")
    model = bare if adapter(run.case) is None else "PeftModelForCausalLM"
    wrapper, parameters = wrapper_and_parameters(run.backend, model)
    assert result.each_rank("world") == [RANKS] * RANKS
    assert result.each_rank("wrapper") == [wrapper] * RANKS
    assert result.each_rank("parameters") == [parameters] * RANKS


@_each(("fused", "misled", "compiled"), *_FLOAT32_CASES)
def test_trains_what_stock_trains(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = _distances(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == _close(stocks["losses"])
        assert len(mine["logs"]) == len(stocks["logs"]) == STEPS
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            assert my_log.keys() - stock_log.keys() == {"fused/rows_recomputed"}
            expected = {name: value for name, value in stock_log.items() if name != "step_time"}
            assert {name: my_log[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@_each(("compiled",))
def test_what_can_be_compiled_under_an_engine_is(run: Run, outcome):
    """Nothing runs as it is. ZeRO-3 gathers the weights of each projection by itself."""
    for calls in outcome(run).each_rank("compiled"):
        names = {"LlamaRMSNorm", "modeling_llama_apply_rotary_pos_emb"}
        names |= {"LlamaMLP_activation" if run.backend == "zero3" else "LlamaMLP"}
        assert names - calls.keys() == set()
        assert "eager" not in calls


@_each(("verified",))
def test_a_comparison_with_trls_own_path_leaves_the_training_as_it_was(run: Run, outcome):
    """To the bit: nobody reduces or keeps a gradient of it. Where weights are sharded there is none."""
    verified, fused = outcome(run), outcome(run, "fused")
    assert verified.moved.keys() == fused.moved.keys()
    assert all(torch.equal(moved, fused.moved[name]) for name, moved in verified.moved.items())
    for mine in verified.ranks:
        errors = [[entry.get(f"fused/verify_{name}") for name in ("loss", "head_grad")] for entry in mine["logs"]]
        assert errors[1] == [None, None]
        for error in (*errors[0], *errors[2]):
            assert error is None if run.backend == "fsdp2" else error <= TOLERANCE


@_each(("fused",), *ARCHITECTURES)
def test_an_architecture_trains_what_stock_trains(run: Run, outcome):
    """
    Also where processes have other numbers and lengths of sequences, or one of them has no image or no completion.
    Stock trains under DDP: the gradient of a composite model's head is another in stock under FSDP2.
    """
    fused, stock = outcome(run), outcome(Run("ddp", run.case, "stock"))
    distances = _distances(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == _close(stocks["losses"])
        if not run.case.startswith(("deaf", "wide")):
            assert (mine["layouts"], mine["warnings"]) == (["packed"] * len(mine["layouts"]), [])


@_each(("fused",), "deaf", "deaf-holes")
def test_attention_that_ignores_where_sequences_begin_is_found_out_on_all_processes(run: Run, outcome):
    """By the first batch, which can tell on one of them alone; both lay out aligned, and each is told once."""
    for rank, seen in enumerate(outcome(run).ranks):
        has_holes = run.case == "deaf-holes" and rank == 0
        assert seen["layouts"] == ["padded" if has_holes else "aligned"] * (STEPS * ACCUMULATION)
        told = [message for message in seen["warnings"] if "when sequences share a row" in message]
        assert len(told) == 1


@_each(("fused",), "wide")
def test_rows_too_wide_on_one_process_have_the_layout_of_all(run: Run, outcome):
    """In layouts of their own they would call the model another number of times, and wait for one another."""
    layouts = ["aligned"] * ACCUMULATION + ["padded"] * (STEPS - 1) * ACCUMULATION
    for seen in outcome(run).ranks:
        assert seen["layouts"] == layouts


@_each(("fused",), *SHARED)
def test_micro_batches_that_share_a_forward_train_what_stock_trains(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = _distances(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        assert mine["losses"] == _close(stocks["losses"])  # each in its own step
        waited = torch.tensor(mine["waited"]).view(STEPS, ACCUMULATION)
        assert waited[:, :-1].all()
        assert not waited[:, -1].any()
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            assert my_log.keys() - stock_log.keys() == {"fused/rows_recomputed"}
            assert my_log["fused/rows_recomputed"] == 0.0


@_each(("out-of-memory",))
def test_memory_that_runs_out_on_one_process_splits_the_forward_on_all(run: Run, outcome):
    """No process waits for another; loss, logs and gradients are those of micro-batches that share no forward."""
    split, stock = outcome(run), outcome(run, "stock")
    distances = _distances(split.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    for mine, stocks in zip(split.ranks, stock.ranks, strict=True):
        assert mine["losses"] == _close(stocks["losses"])
        assert not any(mine["waited"])
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)


@_each(("fused",), "untied", "tied")
def test_gradients_are_those_of_all_rows(run: Run, outcome, one_process):
    """The rows of both ranks move every parameter, the head or the embedding tied to it among them."""
    seen, moved = one_process(run.case)
    fused = outcome(run)
    distances = _distances(fused.moved, moved)
    assert ("model.embed_tokens.weight" if run.case == "tied" else "lm_head.weight") in distances
    assert max(distances.values()) <= TOLERANCE, distances
    assert torch.tensor(fused.each_rank("losses")).mean(0).tolist() == _close(seen["losses"])


@_each(("fused",), "shared-forward")
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


@_each(("fused",), "exchanged")
def test_processes_with_unequal_lengths_exchange_sequences_and_train_and_log_what_stock_does(run: Run, outcome):
    fused, stock = outcome(run), outcome(run, "stock")
    distances = _distances(fused.moved, stock.moved)
    assert max(distances.values()) <= TOLERANCE, distances
    losses, expected_losses = (torch.tensor(result.each_rank("losses")).mean(0).tolist() for result in (fused, stock))
    assert losses == _close(expected_losses)
    for mine, stocks in zip(fused.ranks, stock.ranks, strict=True):
        for my_log, stock_log in zip(mine["logs"], stocks["logs"], strict=True):
            assert my_log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=TOLERANCE)
            expected = {name: value for name, value in stock_log.items() if name != "step_time"}
            assert "entropy" in expected
            assert {name: my_log[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    processes = torch.tensor(fused.each_rank("generated_by")).flatten(1)
    if not trl_compat.METRICS_COUNT_ALL_PROCESSES:
        assert processes.numel() == 0
        return
    assert [row.unique().tolist() for row in processes] == [[*range(RANKS)]] * RANKS
    tokens = torch.tensor(fused.each_rank("tokens")).view(RANKS, STEPS, ACCUMULATION).sum(2)
    before = torch.tensor(stock.each_rank("tokens")).view(RANKS, STEPS, ACCUMULATION).sum(2)
    assert before.sum(0).tolist() == tokens.sum(0).tolist()
    assert (tokens[0] - tokens[1]).abs().max() < 0.2 * (before[0] - before[1]).abs().max()


@_each(("fused",), *HEADS)
def test_a_head_with_an_adapter_trains_as_in_one_process(run: Run, outcome, one_process):
    """PEFT's modules around the head gather what they hold, whichever of them the engine has wrapped."""
    seen, moved = one_process(run.case)
    fused = outcome(run)
    distances = _distances(fused.moved, moved)
    parts = ["modules_to_save.default"] if HEADS[run.case].saved else ["lora_A.default", "lora_B.default"]
    assert [f"base_model.model.lm_head.{part}.weight" in distances for part in parts] == [True] * len(parts)
    assert max(distances.values()) <= TOLERANCE, distances
    assert torch.tensor(fused.each_rank("losses")).mean(0).tolist() == _close(seen["losses"])


@pytest.mark.parametrize("run", [pytest.param(run, id=run.name) for run in REFUSED if run.trainer == "fused"])
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


@_each(("fused",), "reference")
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


@_each(("fused",), "bf16")
def test_mixed_precision_leaves_log_probs_in_float32(run: Run, outcome, one_process):
    """Accelerate has FSDP2 round what a forward returns. Rounded gradients would also differ from the forecast."""
    _, truth = one_process(run.case)
    fused, stock = outcome(run), outcome(run, "stock")
    policy_and_reference = torch.tensor(fused.ranks[0]["logps"][0])
    assert not torch.equal(policy_and_reference, policy_and_reference.bfloat16().float())
    recomputed, rows = torch.tensor(fused.each_rank("recomputed")).sum((0, 1)).tolist()
    assert recomputed / rows < 0.05
    assert _error(fused.moved, truth) < 1.1 * _error(stock.moved, truth)


@_each(("fused",), "untied", "tied", "lora", *HEADS)
def test_a_right_forecast_recomputes_nothing(run: Run, outcome):
    for rank, counts in enumerate(outcome(run).each_rank("recomputed")):
        assert all(recomputed == 0 for recomputed, _ in counts)
        assert all((rows == 0) == ((rank, i) in batches.MASKED) for i, (_, rows) in enumerate(counts))


@_each(("misled",))
def test_a_wrong_forecast_costs_the_rank_that_has_it(run: Run, outcome):
    right, wrong = outcome(run).each_rank("recomputed")
    assert all(recomputed == 0 for recomputed, _ in right)
    assert all(0 < recomputed < rows for recomputed, rows in wrong if rows)


@_each(("fused", "misled"))
def test_the_fraction_of_recomputed_rows_is_the_same_on_every_rank(run: Run, outcome):
    result = outcome(run)
    recomputed, rows = torch.tensor(result.each_rank("recomputed"), dtype=torch.float64).sum(0).unbind(-1)
    expected = (
        (recomputed / rows).view(STEPS, ACCUMULATION).nanmean(1).tolist()
    )  # nothing is logged for a micro-batch that waits
    for logs in result.each_rank("logs"):
        assert [entry["fused/rows_recomputed"] for entry in logs] == pytest.approx(expected)
