"""`--jobs`: cases in several processes give the results that they give in one."""

import dataclasses
import json
import sys
import time
from functools import partial
from importlib import import_module

import pytest
import torch

from tests.harness import CUSTOMISED_CASES
from tests.harness.compare import DrawnComparison
from tests.harness.fuzz import run_named
from trl_fused_grpo.parity import CASES, ISSUE_1082_CASES, Settings
from trl_fused_grpo.parity.compare import run_cases
from trl_fused_grpo.parity.judge import Result


def named(cases, name):
    return next(case for case in cases if case.name == name)


def figures(result):
    return dataclasses.replace(result, seconds=0.0)


@pytest.mark.parametrize(
    "names",
    [("is-token-mask",), pytest.param(("is-token-mask", "accumulation-one-forward"), marks=pytest.mark.nightly)],
    ids=len,
)
def test_processes_give_the_same_results(tmp_path, names):
    cases = [named(CASES, name) for name in names]
    here, there = ({r.name: figures(r) for r in run_cases(cases, Settings(tmp_path), jobs)} for jobs in (1, 2))
    assert there == here
    assert [result.verdict for result in there.values()] == ["equal"] * len(names)


@pytest.mark.nightly
def test_a_report_of_issue_1082_may_be_shared(parity, tmp_path):
    file = tmp_path / "results.json"
    names = [case.name for case in ISSUE_1082_CASES[:2]]
    parity("--issue-1082", "--jobs", "2", *(word for name in names for word in ("--case", name)), "--json", str(file))
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == names


def first_is_slow(folder, case, settings):
    """In a process of its own: the first case lasts until a second after the three others."""
    if case.name == CASES[0].name:
        while len(list(folder.iterdir())) < 3:
            time.sleep(0.1)
        time.sleep(1)
    else:
        (folder / case.name).touch()
    return Result(case.name, "")


@pytest.mark.nightly
def test_a_case_that_takes_long_does_not_withhold_the_results_of_others(tmp_path):
    results = run_cases(CASES[:4], Settings(tmp_path), 2, compare=partial(first_is_slow, tmp_path))
    assert [result.name for result in results][-1] == CASES[0].name


@pytest.mark.parametrize("names", [("is-token-mask", "dapo"), ("random:0:0", "random:0:1")], ids=lambda names: names[0])
def test_the_report_is_in_the_order_of_the_cases(parity, harness, tmp_path, monkeypatch, names):
    def from_the_last(cases, settings, jobs, prepare, *compare):
        return reversed(list(run_cases(cases, settings, 1, prepare, *compare)))

    for module in ("trl_fused_grpo.parity.compare", "tests.harness.fuzz"):
        monkeypatch.setattr(import_module(module), "run_cases", from_the_last)
    file = tmp_path / "results.json"
    run = harness if names[0].startswith("random:") else parity
    assert run(*(word for name in names for word in ("--case", name)), "--json", str(file)).exit_code == 0
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == [*names]


@pytest.mark.nightly
def test_customised_cases_may_be_shared(tmp_path):
    settings = Settings(tmp_path, dtype=torch.bfloat16)  # which skips whole trainings
    [training] = run_named(["lora"], settings, jobs=2)
    assert training.description == named(CUSTOMISED_CASES, "lora").description
    assert training.verdict == "skipped"


def test_nothing_runs_after_a_case_that_lost_the_device(tmp_path, monkeypatch):
    """A kernel that reads out of bounds fails later, in a case that has no part in it; stock's would be skipped."""
    monkeypatch.setattr(DrawnComparison, "in_float32", lambda self: [])
    monkeypatch.setattr(
        sys.modules[DrawnComparison.__module__], "_device_loss", lambda: "CUDA error: device-side assert triggered"
    )
    names = [f"random:0:{index}" for index in range(3)]
    results = list(run_named(names, Settings(tmp_path, device="cuda"), jobs=1))
    assert [result.verdict for result in results] == ["failed"]
    assert "device-side assert" in results[0].reason
