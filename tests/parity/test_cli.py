"""`trl-fused-grpo parity`: verdicts, exit codes, files. A few cases run here; the command runs them all."""

import dataclasses
import json
import math

import pytest
import torch
import trl
from packaging.version import Version
from typer.testing import CliRunner

from trl_fused_grpo import FusedGRPOTrainer, read_lm_head
from trl_fused_grpo.cli import app
from trl_fused_grpo.parity import CASES, CUSTOMISED_CASES, MODEL_CASES
from trl_fused_grpo.parity.errors import differing_metrics, measure
from trl_fused_grpo.parity.judge import bfloat16_batches
from trl_fused_grpo.parity.run_case import Outcome
from trl_fused_grpo.parity.run_training import Run
from trl_fused_grpo.parity.trainers import StockGRPOTrainer
from trl_fused_grpo.parity.training_errors import differing_entries, first_difference, update_errors


@pytest.fixture
def parity(monkeypatch):
    """Run the command on the CPU and return its result."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str):
        result = CliRunner().invoke(app, ["parity", "--device", "cpu", *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def replace_trainer(monkeypatch):
    """Put another class in place of the fused trainer."""
    return lambda cls: monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", cls)


def test_equal_cases_exit_0(parity):
    result = parity("--case", "issue-1082", "--case", "tool-mask", "--case", "log-probs")
    assert result.exit_code == 0, result.output
    assert "3 equal" in result.output


def test_json_carries_versions_and_figures(parity, tmp_path):
    file = tmp_path / "parity.json"
    assert parity("--case", "issue-1082", "--json", str(file)).exit_code == 0
    content = json.loads(file.read_text())
    assert content["environment"]["trl"] == trl.__version__
    assert content["environment"]["device"] == "cpu"
    assert content["passed"] is True
    [case] = content["cases"]
    assert case["name"] == "issue-1082"
    assert case["loss_error"] <= 1e-5
    assert case["gradient_error"] <= 1e-5
    assert case["fused_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert case["metrics_differ"] == []


@pytest.mark.skipif(Version(trl.__version__) >= Version("0.28"), reason="TRL 0.27's Liger path drops the ratios")
def test_the_bug_report_shows_on_its_version(parity, tmp_path):
    file = tmp_path / "parity.json"
    parity("--case", "issue-1082", "--json", str(file))
    [case] = json.loads(file.read_text())["cases"]
    assert case["liger_ratio"] > 30


def test_what_the_liger_loss_leaves_out_is_shown_beside_the_fused_trainer(parity, tmp_path):
    file = tmp_path / "parity.json"
    result = parity("--issue-1082", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "tokens written by a tool" in result.output
    cases = {case["name"].removeprefix("issue-1082-"): case for case in json.loads(file.read_text())["cases"]}
    assert all(case["fused_ratio"] == pytest.approx(1.0, abs=1e-5) for case in cases.values())
    if Version(trl.__version__) < Version("0.28"):
        assert cases["tool-mask"]["liger_error"] > 0.1
        assert cases["normalizer"]["liger_ratio"] == pytest.approx(0.5, abs=1e-3)
        assert cases["delta"]["liger"] == "refuses"


@pytest.mark.parametrize("name", ["dapo-off-policy", "is-token-vespo"])
def test_bfloat16_is_compared_with_float64(parity, tmp_path, name):
    if name == "is-token-vespo" and Version(trl.__version__) < Version("1.0"):
        pytest.skip("this TRL has no VESPO")
    file = tmp_path / "parity.json"
    result = parity("--dtype", "bfloat16", "--case", name, "--json", str(file))
    assert result.exit_code == 0, result.output
    [case] = json.loads(file.read_text())["cases"]
    assert 1e-4 < case["stock_gradient_error"] < 0.5  # the error of bfloat16, and no more


def test_more_batches_are_pooled_where_a_sequence_has_one_weight():
    pooled = {case.name for case in CASES if bfloat16_batches(case) > bfloat16_batches(CASES[0])}
    assert {"is-token-vespo", "is-sequence-mask", "vespo-off-policy", "sequence-level-off-policy"} <= pooled
    assert not pooled & {"vespo", "sequence-level", "is-token-mask", "dapo-off-policy", "is-off"}


def test_unknown_case_names_the_known_ones(parity):
    result = parity("--case", "nonesuch")
    assert result.exit_code == 2
    assert "nonesuch" in result.output
    assert "issue-1082" in result.output


def test_missing_folder_is_a_bad_argument(parity, tmp_path):
    result = parity("--case", "dapo", "--json", str(tmp_path / "nowhere" / "parity.json"))
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_bad_argument(parity):
    result = parity("--device", "cuda")
    assert result.exit_code == 2
    assert "CUDA" in result.output


def test_list_names_every_case(parity):
    result = parity("--list")
    assert result.exit_code == 0
    assert all(case.name in result.output for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_models_are_listed_apart(parity):
    result = parity("--models", "--list")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")]
    assert listed == [case.name for case in MODEL_CASES]
    assert len(set(listed)) == len(listed)
    assert {case.name for case in CASES if case.head} < set(listed)


def test_cases_of_models_show_the_layout(parity, tmp_path):
    file = tmp_path / "parity.json"
    names = {"qwen2": "packed", "mamba2": "packed", "head-lora": "packed"}
    result = parity("--models", *(word for name in names for word in ("--case", name)), "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "layout" in result.output
    cases = json.loads(file.read_text())["cases"]
    assert {case["name"]: case["layout"] for case in cases} == names
    assert all(case["verdict"] == "equal" for case in cases)


def test_customised_cases_are_listed_apart(parity):
    result = parity("--customised", "--list")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")]
    assert listed == [case.name for case in CUSTOMISED_CASES]
    assert len(set(listed)) == len(listed)
    assert parity("--customised", "--models").exit_code == 2


def test_whole_trainings_are_equal(parity, tmp_path):
    file = tmp_path / "parity.json"
    names = ("control", "control-vllm", "generation-advantages", "step-gradients")
    arguments = (word for name in names for word in ("--case", name))
    result = parity("--customised", *arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "4 equal" in result.output
    assert "update" in result.output
    assert all(case["gradient_error"] <= 1e-5 for case in json.loads(file.read_text())["cases"])


def test_trainings_are_compared_in_float32_only(parity):
    result = parity("--customised", "--case", "control", "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert "1 skipped (trainings are compared in float32)" in result.output


def test_a_training_with_another_update_exits_1(parity, replace_trainer):
    class Scaled(FusedGRPOTrainer):
        def _compute_loss(self, *args, **kwargs):
            return super()._compute_loss(*args, **kwargs) * 1.001

    replace_trainer(Scaled)
    result = parity("--customised", "--case", "own-off-policy-mask")
    assert result.exit_code == 1
    assert "metrics differ: grad_norm, loss, train_loss" in " ".join(result.output.split())  # a long line is wrapped


def test_a_control_without_merged_forwards_proves_nothing_and_exits_1(parity, replace_trainer):
    class Alone(FusedGRPOTrainer):
        def compute_liger_loss(self, model, inputs):  # a documented reason for a forward of each micro-batch
            return super().compute_liger_loss(model, inputs)

    replace_trainer(Alone)
    result = parity("--customised", "--case", "control")
    assert result.exit_code == 1
    assert "12 forwards, as many as stock's" in result.output


def test_a_callback_that_sees_something_else_exits_1(parity, replace_trainer):
    class Doubling(FusedGRPOTrainer):
        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            for parameter in model.parameters():
                parameter.grad *= 2
            return norm

    if not hasattr(StockGRPOTrainer, "_clip_grad_norm"):
        pytest.skip("this transformers clips in the loop")
    replace_trainer(Doubling)
    result = parity("--customised", "--case", "step-gradients")
    assert result.exit_code == 1
    assert "update off by" in result.output
    assert "(number 0 of 3)" in result.output


def test_patches_of_trls_class_are_undone(parity):
    before = dict(vars(StockGRPOTrainer))
    parity("--customised", "--case", "trl-own-loss", "--case", "trl-log-probs-late", "--case", "own-shuffle")
    assert dict(vars(StockGRPOTrainer)) == before


def test_every_customisation_has_a_description():
    kinds = (case.customised for case in CUSTOMISED_CASES)
    assert all(kind is not None for kind in kinds)
    assert all(case.description and case.name == case.name.lower() for case in CUSTOMISED_CASES)


def test_cases_of_families_need_the_models_flag(parity):
    result = parity("--case", "qwen2")
    assert result.exit_code == 2
    assert "unknown case qwen2" in result.output
    assert "layout" not in parity("--case", "dapo").output


@pytest.mark.parametrize(("name", "broken"), [("head-bias", {"bias": None}), ("cohere", {"logit_scale": 1.0})])
def test_a_head_read_wrongly_exits_1(parity, monkeypatch, name, broken):
    def misread(*args, **kwargs):
        return dataclasses.replace(read_lm_head(*args, **kwargs), **broken)

    monkeypatch.setattr("trl_fused_grpo.modeling.fused_forward.read_lm_head", misread)
    result = parity("--models", "--case", name)
    assert result.exit_code == 1
    assert "1 different" in result.output


def test_a_wrong_gradient_exits_1(parity, replace_trainer):
    class Scaled(FusedGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * 1.0001

    replace_trainer(Scaled)
    result = parity("--case", "dapo")
    assert result.exit_code == 1
    assert "loss off by 1.0e-04" in result.output
    assert "gradient of" in result.output


def test_a_metric_of_another_name_exits_1(parity, replace_trainer):
    class Renaming(FusedGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self._metrics["train"]["entropies"] = self._metrics["train"].pop("entropy")
            return loss

    replace_trainer(Renaming)
    result = parity("--case", "dapo")
    assert result.exit_code == 1
    assert "entropies (extra), entropy (missing)" in result.output


def test_a_trainer_without_the_fused_function_exits_1(parity, replace_trainer):
    class Unfused(FusedGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.use_liger_loss = False

    replace_trainer(Unfused)
    result = parity("--case", "dapo")
    assert result.exit_code == 1
    assert "no row went through the fused function" in result.output


def test_a_case_that_raises_does_not_hide_the_others(parity, replace_trainer):
    class Picky(FusedGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self.temperature != 1.0:
                raise RuntimeError("no such temperature")

    replace_trainer(Picky)
    result = parity("--case", "temperature", "--case", "dapo")
    assert result.exit_code == 1
    assert "RuntimeError: no such temperature" in result.output
    assert "1 equal" in result.output
    assert "1 failed" in result.output


@pytest.mark.skipif(Version(trl.__version__) >= Version("1.8"), reason="this TRL has the entropy bonus")
def test_a_case_whose_option_trl_lacks_is_skipped(parity):
    result = parity("--case", "entropy-bonus")
    assert result.exit_code == 0
    assert "1 skipped (this TRL has no `entropy_coef`)" in result.output


def test_plot_is_drawn(parity, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "parity.png"
    assert parity("--case", "issue-1082", "--case", "log-probs", "--plot", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_equal_to_an_exact_zero_but_zero():
    zero, noise = Outcome(tensors={"w": torch.zeros(3)}), Outcome(tensors={"w": torch.full((3,), 1e-30)})
    assert measure([zero], [zero]).parameters["w"] == 0.0
    assert math.isinf(measure([zero], [noise]).parameters["w"])


def test_a_nan_gradient_is_the_worst():
    right = Outcome(loss=1.0, tensors={"a": torch.ones(2), "b": torch.ones(2)})
    wrong = Outcome(loss=1.0, tensors={"a": torch.full((2,), math.nan), "b": torch.zeros(2)})
    assert measure([right], [wrong]).worst_parameter == "a"


def test_metrics_differ_by_name_count_and_value():
    stock = {"same": [1.0, math.nan], "value": [1.0], "count": [1.0], "stock": [0.0]}
    fused = {"same": [1.00001, math.nan], "value": [1.01], "count": [1.0, 1.0], "fused": [0.0]}
    assert differing_metrics(stock, fused) == ["count", "fused (extra)", "stock (missing)", "value"]
    assert differing_metrics(stock, fused, values=False) == ["count", "fused (extra)", "stock (missing)"]


def test_log_entries_differ_by_name_value_and_number():
    stock = [{"loss": 1.0, "kl": None}, {"train_loss": 2.0, "epoch": 1}]
    fused = [{"loss": 1.001, "entropy": 1.0}, {"train_loss": 2.00001, "epoch": 1}]
    assert differing_entries(stock, fused) == ["entropy (extra)", "kl (missing)", "loss"]
    assert differing_entries(stock, stock) == []
    assert differing_entries(stock, stock[:1]) == ["entries"]


def test_what_was_seen_differs_by_value_kind_and_number():
    assert first_difference([1.0, "none"], [1.0 + 1e-7, "none"]) is None
    assert first_difference([1.0, 2.0], [1.0, 2.1]) == "saw 2.1 for 2.0 (number 1 of 2)"
    assert first_difference([1.0], ["none"]) == "saw none for 1.0 (number 0 of 1)"
    assert first_difference([1.0], []) == "saw 0 things for 1"


def test_an_update_where_stock_makes_none_is_an_infinite_error():
    zero, fused = (Run({"w": torch.full((3,), value)}, {"w": 1e-3}) for value in (0.0, 1e-9))
    assert math.isinf(update_errors(zero, fused).parameters["w"])


def test_the_rounding_of_weights_is_no_error():
    stock = Run({"w": torch.ones(4)}, {"w": 1e-6})
    off_by_less, off_by_more = (Run({"w": torch.ones(4) + error}) for error in (2e-7, 2e-5))
    assert update_errors(stock, off_by_less).parameters["w"] == 0.0
    assert update_errors(stock, off_by_more).parameters["w"] == pytest.approx(2e-5, rel=0.1)
