"""Whole trainings drawn at random: what is drawn, what stays as a customised case needs it, what is a fault."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from tests.harness import CUSTOMISED_CASES, compare
from tests.harness.case import Training
from tests.harness.random_cases import name_of, options_of, random_case
from tests.harness.random_trainings import FUSED, OBJECTIVE, TRAINER_OPTIONS, WINDOWS, draw_training
from tests.harness.rounding import training_verdict
from tests.harness.run_training import Pair, Run
from tests.harness.shrink import shrink
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer

from .test_random import with_wrong_loss


TRAINING = {"training": True, "seed": 5}


def test_a_seed_and_an_index_draw_the_same_training():
    assert draw_training(3, 5) == draw_training(3, 5)
    assert len({json.dumps(draw_training(3, index)) for index in range(50)}) == 50
    for index in range(100):
        options = options_of(f"random:training:3:{index}")
        assert options.pop("training") is True
        assert options.items() <= draw_training(3, index).items()
        assert options_of(name_of(options)) == options
        assert isinstance(random_case(f"random:training:3:{index}"), Training)


def test_every_option_is_one_of_the_newest_trl():
    drawn = {name for one in (*TRAINER_OPTIONS, *OBJECTIVE, *WINDOWS) for name in one}
    assert drawn <= {option.name for option in fields(GRPOConfig)}
    assert {name for one in FUSED for name in one} <= {option.name for option in fields(FusedGRPOConfig)}


def test_every_customised_case_and_option_is_drawn():
    trainings = [draw_training(0, index) for index in range(3000)]
    customised = {options["customised"] for options in trainings if "customised" in options}
    without_update = {case.name for case in CUSTOMISED_CASES if case.customised.has_no_update}
    assert customised == {case.name for case in CUSTOMISED_CASES} - without_update
    drawn = set().union(*trainings)
    assert drawn >= {name for one in (*TRAINER_OPTIONS, *OBJECTIVE, *WINDOWS, *FUSED) for name in one}


def test_what_a_customised_case_needs_stays():
    options = {**TRAINING, "model": "gpt2", "steps_per_generation": 2, "max_grad_norm": 0.1, "env_mask": True}
    case = random_case(name_of({**options, "customised": "misaligned-vllm"}))
    assert case.config["steps_per_generation"] == 3
    assert (case.config["max_grad_norm"], case.model, case.seed) == (0.1, "gpt2", 5)
    assert (case.data.sampling, case.data.env_mask) == ("token", True)
    case = random_case(name_of({**options, "customised": "attention-dropout"}))
    assert case.model == "attention-dropout"


def test_an_option_that_the_trainer_lacks_is_left_out():
    options = {**TRAINING, "customised": "rloo-zero-grad", "loss_type": "bnpo", "weight_decay": 0.1}
    config = random_case(name_of(options)).config
    assert "loss_type" not in config
    assert config["weight_decay"] == 0.1


def test_drawn_trainings_are_equal(harness, tmp_path):
    file = tmp_path / "random.json"
    result = harness("--customised", "--random", "2", "--seed", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == [
        f"random:training:1:{index}" for index in range(2)
    ]


@pytest.mark.nightly
def test_a_planted_fault_is_shrunk_to_what_it_needs(settings, monkeypatch, replace_trainer):
    monkeypatch.setattr("tests.harness.rounding.MOVES", 2)
    replace_trainer(with_wrong_loss("weight_decay", 1.001))
    options = {**TRAINING, "customised": "substep-gradients", "weight_decay": 0.1, "beta": 0.3, "env_mask": True}
    found = compare(random_case(name_of(options)), settings)
    assert found.verdict == "different"
    smallest, _ = shrink(options, found, settings)
    assert smallest == {"weight_decay": 0.1}  # a single step shows it
    replace_trainer(FusedGRPOTrainer)
    assert compare(random_case(name_of(smallest)), settings).verdict == "equal"


def test_what_stock_cannot_run_is_skipped(settings):
    result = compare(random_case(name_of({**TRAINING, "customised": "layer-hook-token", "model": "gpt2"})), settings)
    assert result.verdict == "skipped"
    assert result.reason.startswith("stock itself fails")


@pytest.mark.parametrize(
    ("moved", "verdict"),
    [([0.0, 2e-4], "tie"), ([1e-4, 0.7e-4], "rounding"), ([1e-5, 2e-5], None), ([0.0, 0.0], None)],
)
def test_stock_moved_by_rounding_tells_rounding_from_a_difference(monkeypatch, moved, verdict):
    """The fused training is 2e-4 from stock's; stock's, from weights that rounding moves, by so much each time."""
    monkeypatch.setattr("tests.harness.rounding.MOVES", len(moved))
    starts, errors = [], iter(moved)

    def run(error):
        change = torch.tensor([1.0, 1.0]) * (1 + error)
        return Run(change={"w": change}, rounding={"w": 0.0}, log=[{"loss": 1.0, "train_loss": 1.0}])

    def stock(start, change):
        starts.append(start["w"])
        return run(next(errors))

    trainings = SimpleNamespace(start={"w": torch.ones(2)}, stock=stock)
    pair = Pair(run(0.0), {None: run(2e-4)}, trainings)
    assert training_verdict(random_case(name_of(TRAINING)), pair) == verdict
    assert all(0 < (start - 1).abs().max() < 1e-6 for start in starts)


# What drawn trainings have found, each with what was wrong
FOUND = {
    # Its forwards draw random numbers, before TRL shuffles the sequences in stock and after it here
    "reference-with-dropout": {"customised": "attention-dropout", "adapter": "ia3", "beta": 0.3},
    # A hook on the head looked for the smallest of no numbers
    "debug-without-tokens": {
        "debug": "underflow_overflow",
        "mask_truncated_completions": True,
        "truncated_rows": [0, 1, 2, 3, 4, 5],
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
    },
}


@pytest.mark.parametrize("options", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(settings, options):
    result = compare(random_case(name_of({**TRAINING, **options})), settings)
    assert result.verdict == "equal", result.reason
