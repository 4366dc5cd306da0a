"""`trl-fused-grpo parity`: verdicts, exit codes, files. A few cases run here; the command runs them all."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
import trl
from packaging.version import Version

from trl_fused_grpo import FusedGRPOTrainer, read_lm_head
from trl_fused_grpo.parity import CASES, MODEL_CASES
from trl_fused_grpo.parity.case import SkippedError
from trl_fused_grpo.parity.judge import bfloat16_batches


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


@pytest.mark.sample(1)
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


def test_an_unknown_case_names_those_that_are_near(parity):
    result = parity("--case", "isue-1082")
    assert result.exit_code == 2
    assert "unknown case isue-1082: did you mean issue-1082?" in result.output
    assert "dapo" not in result.output
    assert "--list names the known ones" in parity("--case", "?").output


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
    names = {"qwen2": "packed", "head-lora": "packed"}
    result = parity("--models", *(word for name in names for word in ("--case", name)), "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "layout" in result.output
    cases = json.loads(file.read_text())["cases"]
    assert {case["name"]: case["layout"] for case in cases} == names
    assert all(case["verdict"] == "equal" for case in cases)


def test_cases_of_families_need_the_models_flag(parity):
    result = parity("--case", "qwen2")
    assert result.exit_code == 2
    assert "unknown case qwen2" in result.output
    assert "layout" not in parity("--case", "dapo").output


@pytest.mark.parametrize(("name", "broken"), [("head-bias", {"bias": None}), ("cohere", {"logit_scale": 1.0})])
def test_a_head_read_wrongly_exits_1(parity, monkeypatch, name, broken):
    def misread(*args, **kwargs):
        return dataclasses.replace(read_lm_head(*args, **kwargs), **broken)

    monkeypatch.setattr("trl_fused_grpo.modeling.head.fused_forward.read_lm_head", misread)
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


def test_a_plot_without_errors_is_not_written(parity, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "trl_fused_grpo.parity.trainers.config_options", mock.Mock(side_effect=SkippedError("not here"))
    )
    file = tmp_path / "parity.png"
    result = parity("--case", "dapo", "--plot", str(file))
    assert (result.exit_code, file.exists()) == (0, False)
    assert "was not written" in result.output
