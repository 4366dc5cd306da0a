"""`--jobs`: cases in several processes give the results that they give in one."""

import dataclasses
import json
import sys
import time

import pytest
import torch

from trl_fused_grpo.parity import CASES, CUSTOMISED_CASES, ISSUE_1082_CASES, MODEL_CASES, Settings, compare, jobs
from trl_fused_grpo.parity.jobs import run_cases
from trl_fused_grpo.parity.result import Result


def named(cases, name):
    return next(case for case in cases if case.name == name)


def figures(result):
    return dataclasses.replace(result, seconds=0.0)


def test_processes_give_the_same_results(tmp_path):
    cases = [named(CASES, "is-token-mask"), named(CASES, "accumulation-one-forward")]
    here, there = ({r.name: figures(r) for r in run_cases(cases, Settings(tmp_path), jobs)} for jobs in (1, 2))
    assert there == here
    assert [result.verdict for result in there.values()] == ["equal", "equal"]


def test_every_set_of_cases_may_be_shared():
    for cases in (CASES, MODEL_CASES, CUSTOMISED_CASES, ISSUE_1082_CASES):
        assert {id(case) for case in cases} <= {id(case) for case in jobs._all_cases()}


def test_a_report_of_issue_1082_may_be_shared(parity, tmp_path):
    file = tmp_path / "results.json"
    names = [case.name for case in ISSUE_1082_CASES[:2]]
    parity("--issue-1082", "--jobs", "2", *(word for name in names for word in ("--case", name)), "--json", str(file))
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == names


def first_is_slow():
    """In a process of its own: the first case takes three seconds, the others nothing."""

    def compare(case, settings):
        time.sleep(3 if case.name == CASES[0].name else 0)
        return Result(case.name, "")

    jobs.compare = compare


def test_a_case_that_takes_long_does_not_withhold_the_results_of_others(tmp_path):
    results = run_cases(CASES[:4], Settings(tmp_path), 2, first_is_slow)
    assert [result.name for result in results][-1] == CASES[0].name


@pytest.mark.parametrize("selected", [("--case", "is-token-mask", "--case", "dapo"), ("--random", "2")], ids=len)
def test_the_report_is_in_the_order_of_the_cases(parity, tmp_path, monkeypatch, selected):
    in_turn = jobs.run_cases
    names = []

    def from_the_last(cases, settings, *_):
        names.extend(case.name for case in cases)
        return reversed(list(in_turn(cases, settings, 1)))

    for module in ("cli.parity", "parity.fuzz"):
        monkeypatch.setattr(f"trl_fused_grpo.{module}.run_cases", from_the_last)
    file = tmp_path / "results.json"
    assert parity(*selected, "--json", str(file)).exit_code == 0
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == names


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
