"""The committed records of benchmarks are short, and the figures can be drawn from them."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.fixture
def benchmark_module(monkeypatch):
    """A module of `benchmarks/`, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run_script(name, *arguments):
    """Run a script of `benchmarks/` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_as_short_as_it_gets(path, benchmark_module):
    records = benchmark_module("records")
    text = path.read_text(encoding="utf-8")
    assert text == records.as_text(records.shortened(json.loads(text)))


def test_a_full_parity_record_loses_all_but_verdict_errors_and_layout(tmp_path, benchmark_module):
    case = {"name": "grpo", "description": "grpo, on-policy", "verdict": "equal", "reason": "", "loss": -0.25}
    case |= {"loss_error": 1e-7, "gradient_error": 2e-6, "stock_loss_error": None, "metrics_differ": []}
    case |= {"worst_parameter": "lm_head.weight", "layout": "packed", "seconds": 1.5}
    records = benchmark_module("records")
    records.write_record(tmp_path / "parity.json", {"passed": True, "cases": [case]})
    kept = {"name": "grpo", "verdict": "equal", "loss_error": 1e-7, "gradient_error": 2e-6, "layout": "packed"}
    text = (tmp_path / "parity.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"passed": True, "cases": [kept]}
    assert f" {json.dumps(kept)}\n" in text  # one line


def test_figures_are_drawn_from_the_records(benchmark_module):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = benchmark_module("figures")
    drawn = [figures.draw_loss("loss-h200.json"), figures.draw_curve("curve-h200.json")]
    drawn += [figures.draw_windows(figures.WINDOWS), figures.draw_step("step-h200.json")]
    drawn += [figures.draw_micro_batches("micro-batches-cpu.json")]
    assert all(axes.has_data() for figure in drawn for axes in figure.axes)
    pyplot.close("all")


def test_whole_steps_of_architectures_are_compared_and_recorded(tmp_path):
    path = tmp_path / "record.json"
    options = ["--size", "tiny", "--device", "cpu", "--repeats", "1", "--stock-repeats", "1", "--json", str(path)]
    run_script("architectures.py", "--model", "qwen3-vl-images", "--model", "lfm2", *options)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"commit", "command", "versions", "device"} <= record.keys()
    assert [entry["name"] for entry in record["results"]] == ["stock", "ours"] * 2
    for ours in record["results"][1::2]:
        assert ours["right"]
        assert ours["distance"] < 1e-5
        assert ours["layout"] in {"packed", "aligned", "padded"}


def test_long_sequences_are_compared_and_large_tensors_seen(tmp_path):
    path = tmp_path / "record.json"
    run_script("long_sequences.py", "--size", "tiny", "--device", "cpu", "--json", str(path))
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert all(entry["right"] for entry in results)
    one_row = [entry for entry in results if entry["name"] == "one row"]
    assert [entry["case"] for entry in one_row] == ["wide-mlp", "wide-heads"]
    assert all(entry["exceeding"] and entry["distance"] < 1e-5 for entry in one_row)
