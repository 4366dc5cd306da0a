"""`python -m tests.harness --customised`: whole trainings with what users change, and what it notices."""

import json

import pytest

from tests.harness import CUSTOMISED_CASES, compare
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.trainers import StockGRPOTrainer


def test_customised_cases_are_listed_apart(harness):
    result = harness("--customised", "--list")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")]
    assert listed == [case.name for case in CUSTOMISED_CASES]
    assert len(set(listed)) == len(listed)
    assert harness("--customised", "--case", "contrl").exit_code == 2


def test_whole_trainings_are_equal(harness, tmp_path):
    file = tmp_path / "parity.json"
    names = ("control", "control-vllm", "generation-advantages", "step-gradients")
    arguments = (word for name in names for word in ("--case", name))
    result = harness("--customised", *arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "4 equal" in result.output
    assert "update" in result.output
    assert all(case["gradient_error"] <= 1e-5 for case in json.loads(file.read_text())["cases"])


@pytest.mark.parametrize("case", CUSTOMISED_CASES[::10], ids=lambda case: case.name)
def test_every_tenth_training_is_equal(case, settings):
    """`make matrix` runs all of them."""
    result = compare(case, settings)
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert (result.verdict, result.reason) == ("equal", "")


def test_rows_of_an_objective_of_ones_own_count_as_recomputed(harness, tmp_path):
    file = tmp_path / "parity.json"
    assert harness("--customised", "--case", "own-loss", "--case", "control", "--json", str(file)).exit_code == 0
    of_case = {case["name"]: case["recomputed"] for case in json.loads(file.read_text())["cases"]}
    assert of_case["control"] == 0.0
    if trl_compat.COMPUTES_LOGPS_OF_PADDING:  # then rows of padding are computed too
        assert 0.3 < of_case["own-loss"] < 1.0
    else:
        assert of_case["own-loss"] == 1.0


def test_trainings_are_compared_in_float32_only(harness):
    result = harness("--customised", "--case", "control", "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert "1 skipped (trainings are compared in float32)" in result.output


def test_a_training_with_another_update_exits_1(harness, replace_trainer):
    class Scaled(FusedGRPOTrainer):
        def _compute_loss(self, *args, **kwargs):
            return super()._compute_loss(*args, **kwargs) * 1.001

    replace_trainer(Scaled)
    result = harness("--customised", "--case", "own-off-policy-mask")
    assert result.exit_code == 1
    assert "metrics differ: grad_norm, loss, train_loss" in " ".join(result.output.split())  # a long line is wrapped


def test_a_control_without_merged_forwards_proves_nothing_and_exits_1(harness, replace_trainer):
    class Alone(FusedGRPOTrainer):
        def compute_liger_loss(self, model, inputs):  # a documented reason for a forward of each micro-batch
            return super().compute_liger_loss(model, inputs)

    replace_trainer(Alone)
    result = harness("--customised", "--case", "control")
    assert result.exit_code == 1
    assert "12 forwards, as many as stock's" in result.output


def test_a_callback_that_sees_something_else_exits_1(harness, replace_trainer):
    class Doubling(FusedGRPOTrainer):
        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            for parameter in model.parameters():
                parameter.grad *= 2
            return norm

    if not hasattr(StockGRPOTrainer, "_clip_grad_norm"):
        pytest.skip("this transformers clips in the loop")
    replace_trainer(Doubling)
    result = harness("--customised", "--case", "step-gradients")
    assert result.exit_code == 1
    assert "update off by" in result.output
    assert "(number 0 of 3)" in result.output


def test_patches_of_trls_class_are_undone(harness):
    before = dict(vars(StockGRPOTrainer))
    harness("--customised", "--case", "trl-own-loss", "--case", "trl-log-probs-late", "--case", "own-shuffle")
    assert dict(vars(StockGRPOTrainer)) == before


def test_every_customisation_has_a_description():
    assert all(case.description and case.name == case.name.lower() for case in CUSTOMISED_CASES)
