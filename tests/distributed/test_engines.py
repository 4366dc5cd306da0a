"""
Engines by features: each trains three steps on what the model generates, and ends where one process of stock TRL ends
that trained on the same rows.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3ForCausalLM

from tests.examples import small
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from .adapters import REFUSES_ADAPTER_ON_HEAD
from .engines import wrapper_and_parameters
from .launching import launch
from .table import GENERATIONS, HALF, LAUNCHES, SPLITS, STEPS, Training
from .trainings import train


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="tools and images of other releases have other templates"),
]

TOLERANCE = 1e-5  # relative, float32
LAUNCH_SECONDS = 3500
Moved = dict[str, torch.Tensor]

_NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
_CLASSES = {"images": "LlavaForConditionalGeneration"}


def _each(condition: Callable[[Training], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Once for each training of the fused trainer that meets a condition."""
    return pytest.mark.parametrize(
        "training",
        [
            pytest.param(training, id=training.name, marks=_NEEDS_DEEPSPEED if training.engine[0] == "z" else ())
            for trainings in LAUNCHES.values()
            for training in trainings
            if training.trainer == "fused" and condition(training)
        ],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models: text, text with tied embeddings, and images."""
    folder = tmp_path_factory.mktemp("engines")
    small.save_model(folder / "text")
    small.save_model_with_images(folder / "images")
    small.save_tokenizer(folder / "tied")
    config = AutoConfig.from_pretrained(folder / "text", tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "tied")
    return folder


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Callable[[Training], tuple[list[dict[str, Any]], Moved]]:
    """What each rank saw in a training, and how far parameters moved. The first one starts its launch."""

    @cache
    def start(name: str) -> str:
        nodes, processes = (2, 2) if name.startswith("nodes") else (1, LAUNCHES[name][0].processes)
        return launch(["tests.distributed.trainings", name, str(folder)], processes, nodes, LAUNCH_SECONDS)

    def of(training: Training) -> tuple[list[dict[str, Any]], Moved]:
        printed = start(next(name for name, trainings in LAUNCHES.items() if training in trainings))
        result = folder / f"{training.name}.json"
        if not result.exists():
            pytest.fail(f"{training.name} did not finish:\n{printed[-6000:]}")
        assert "a reward function has changed the model" not in printed  # engines gather, shard and cast them
        return json.loads(result.read_text()), load_file(result.with_suffix(".safetensors"))

    return of


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Callable[[Training], tuple[dict[str, Any], Moved]]:
    """What one process trains, here."""

    @cache
    def of(training: Training) -> tuple[dict[str, Any], Moved]:
        with mock.patch.dict(os.environ):  # the trainer leaves settings there
            return train(training, folder)

    return of


def oracle(training: Training) -> Training:
    """Stock in one process, on dense log-probs where stock refuses the adapter."""
    refused = "lm_head" in training.of.lora and REFUSES_ADAPTER_ON_HEAD
    return training.alone("dense" if refused else "stock")


@_each()
def test_processes_train_under_the_wrapper_that_was_asked_for(training: Training, outcome):
    ranks, _ = outcome(training)
    bare = _CLASSES.get(training.of.model, "Qwen3ForCausalLM")
    model = bare if not training.of.lora else "PeftModelForCausalLM"
    wrapper, parameters = wrapper_and_parameters(training.engine, model)
    assert [seen["world"] for seen in ranks] == [training.processes] * training.processes
    for seen in ranks:
        assert (seen["wrapper"], seen["parameters"]) == (wrapper, parameters)
        assert (seen["layout"], seen["forwards"]) == ("packed", training.of.forwards * STEPS)
        assert (seen["scaler"] is not None) == (training.precision == "fp16")


@_each()
def test_completions_are_those_of_one_process(training: Training, outcome, one_process):
    """The model is run for each token, with the weights of that step; half precision is compared elsewhere."""
    ranks, _ = outcome(training)
    alone, _ = one_process(oracle(training))
    together = [[*chain(*parts)] for parts in zip(*(seen["completions"] for seen in ranks), strict=True)]
    assert together == alone["completions"]
    assert len({len(ids) for batch in together for ids in batch}) > 4


@_each(lambda training: training.feature not in HALF)
def test_weights_and_logs_are_those_of_one_process_of_stock(training: Training, outcome, one_process):
    """Loss, every metric, the gradient's norm, and how far each weight moved in three steps."""
    ranks, moved = outcome(training)
    alone, truth = one_process(oracle(training))
    assert far(moved, truth, alone["rounding"]) == {}
    for seen in ranks:
        assert len(seen["logs"]) == len(alone["logs"]) == STEPS
        for entry, expected in zip(seen["logs"], alone["logs"], strict=True):
            assert entry.keys() - expected.keys() == {"fused/rows_recomputed"}
            expected = {name: value for name, value in expected.items() if name != "step_time"}
            assert {name: entry[name] for name in expected} == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)


@_each(lambda training: training.feature in {feature for feature, _ in SPLITS})
def test_weights_do_not_depend_on_processes_and_micro_batches(training: Training, outcome, one_process):
    """Stock's here are those of one process and one micro-batch."""
    _, moved = outcome(training)
    alone, truth = one_process(replace(training.alone(), processes=1, micro_batches=1))
    assert far(moved, truth, alone["rounding"]) == {}


def far(moved: Moved, truth: Moved, rounding: dict[str, float]) -> dict[str, float]:
    """
    Parameters that did not move as in one process, with the distance relative to the movement. Each step rounds each
    weight, in both trainings. Gradients that are zero but for rounding, as of a bias of keys, are nothing beside all.
    """
    assert {name: value.shape for name, value in moved.items()} == {name: value.shape for name, value in truth.items()}
    whole = torch.stack([value.norm() for value in truth.values()]).norm().item()
    assert whole > 0
    return {
        name: distance / value.norm().item()
        for name, value in truth.items()
        if (distance := (moved[name] - value).norm().item())
        > TOLERANCE * value.norm().item() + 2 * STEPS * rounding[name] + 1e-8 * whole
    }


@_each(lambda training: training.feature in HALF)
def test_half_precision_is_as_near_to_float32_as_stocks_in_the_same_engine(training: Training, outcome, one_process):
    """But for the prompts: they stand once, so that gradients of their completions are added in half precision."""
    (ranks, moved), (_, stocks) = outcome(training), outcome(training.with_trainer("stock"))
    alone, truth = one_process(training.alone("exact"))
    assert error(moved, truth) < 1.15 * error(stocks, truth)
    for entry, expected in zip(ranks[0]["logs"], alone["logs"], strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert entry[name] == pytest.approx(expected[name], rel=0.01)
        for name in ("reward", "reward_std", "num_tokens", "completions/mean_length"):
            assert entry[name] == pytest.approx(expected[name], rel=TOLERANCE)


@_each(lambda training: training.of.algorithm == "rloo")
def test_rloo_is_within_the_same_tolerance_of_float64_and_so_is_stock(training: Training, outcome, one_process):
    """Its ratio is the exponential of a sum over the sequence, in which rounding of log-probs adds up."""
    alone, truth = one_process(training.alone("exact"))
    assert {value.dtype for value in truth.values()} == {torch.float64}
    for trainer in ("fused", "stock"):
        ranks, moved = outcome(training.with_trainer(trainer))
        assert far(moved, truth, alone["rounding"]) == {}, trainer
        assert ranks[0]["logs"][1]["clip_ratio/region_mean"] < 0.5


def error(moved: Moved, truth: Moved) -> float:
    return sum((moved[name] - value).square().sum().item() for name, value in truth.items()) ** 0.5


@_each(lambda training: training.of.tools)
def test_completions_call_tools_on_every_process(training: Training, outcome):
    for seen in outcome(training)[0]:
        for entry in seen["logs"]:
            assert entry["tools/call_frequency"] == pytest.approx(1 / GENERATIONS)
            assert entry["tools/failure_frequency"] == 0.0
        assert all(len(batch) == training.rows for batch in seen["completions"])


@_each(lambda training: training.processes == 4)
def test_two_nodes_have_two_processes_each(training: Training, outcome):
    assert [seen["local_rank"] for seen in outcome(training)[0]] == [0, 1, 0, 1]
