"""`--jobs`: cases in several processes give the results that they give in one."""

import dataclasses
import sys

import torch

from trl_fused_grpo.parity import CASES, CUSTOMISED_CASES, Settings, compare
from trl_fused_grpo.parity.jobs import run_cases


def named(cases, name):
    return next(case for case in cases if case.name == name)


def figures(result):
    return dataclasses.replace(result, seconds=0.0)


def test_processes_give_the_same_results_in_order(tmp_path):
    cases = [named(CASES, "is-token-mask"), named(CASES, "accumulation-one-forward")]
    here, there = (list(run_cases(cases, Settings(tmp_path), jobs)) for jobs in (1, 2))
    assert [figures(result) for result in there] == [figures(result) for result in here]
    assert [result.verdict for result in there] == ["equal", "equal"]


def test_cases_of_one_name_in_two_sets_are_told_apart(tmp_path):
    settings = Settings(tmp_path, dtype=torch.bfloat16)  # which skips whole trainings
    [training] = run_cases([named(CUSTOMISED_CASES, "lora")], settings, jobs=2)
    assert training.description == named(CUSTOMISED_CASES, "lora").description
    assert training.verdict == "skipped"


def test_nothing_runs_after_a_case_that_lost_the_device(tmp_path, monkeypatch):
    """A kernel that reads out of bounds fails later, in a case that has no part in it; stock's would be skipped."""
    module = sys.modules[compare.__module__]
    monkeypatch.setattr(module, "_compare_float32", lambda *_: [])
    monkeypatch.setattr(module, "_device_loss", lambda: "CUDA error: device-side assert triggered")
    results = list(run_cases(CASES[:3], Settings(tmp_path, device="cuda"), jobs=1))
    assert [result.verdict for result in results] == ["failed"]
    assert "device-side assert" in results[0].reason
