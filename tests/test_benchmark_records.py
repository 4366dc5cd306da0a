"""The committed records of benchmarks are short, and the figures can be drawn from them."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import typer

from tests.tiny_training import make_trainer
from trl_fused_grpo.training.findings import Level


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


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_time_and_memory_in_a_table_are_those_of_a_record(page):
    results = [entry for path in RECORDS for entry in json.loads(path.read_text(encoding="utf-8")).get("results", [])]
    measured = {
        f"{entry['ms']:.0f} ms, {entry['peak_gib']:.2f} GiB"
        for entry in results
        if entry.get("ms") and entry.get("peak_gib")
    }
    shown = re.findall(r"\d+ ms, [\d.]+ GiB", (BENCHMARKS.parent / page).read_text(encoding="utf-8"))
    assert len(shown) > 10
    assert {*shown} <= measured


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_what_is_in_brackets_in_a_table_is_relative_to_stock(page):
    number = r"([\d.]+) m?s, ([\d.]+) GiB"
    rows = re.findall(
        rf"\| {number} \| {number} \(([\d.]+)(?:, ([\d.]+))?\) \|", (BENCHMARKS.parent / page).read_text()
    )
    assert len(rows) >= 8
    for *measured, time_ratio, memory_ratio in rows:
        stock_time, stock_gib, time, gib = map(float, measured)
        assert float(time_ratio) == pytest.approx(time / stock_time, abs=0.006 if len(time_ratio) == 4 else 0.0006)
        assert not memory_ratio or float(memory_ratio) == pytest.approx(gib / stock_gib, abs=0.006)


def test_the_readme_says_what_the_records_say():
    """What is no table: the row with generation, the step in bfloat16, the spread over seeds, levels and accuracy."""
    readme = " ".join((BENCHMARKS.parent / "README.md").read_text(encoding="utf-8").split())

    def ours_and_stock(record, case):
        entries = [entry for entry in committed(record) if entry["case"] == case]
        return [next(entry for entry in entries if entry["name"] == name) for name in ("ours", "stock")]

    ours, stock = ours_and_stock("end-to-end-1.7b-h200.json", "1.7b")  # of 128 completions; our first is on stock's
    seconds = [entry["all_ms"][0] / 1e3 for entry in (stock, ours)]
    of_generation = [entry["phases"]["generation"][0] / 1e3 for entry in (stock, ours)]
    peaks = [entry["peak_gib"] for entry in (stock, ours)]
    assert ours["tokens"][0] == stock["tokens"][0]
    assert f"{seconds[0]:.1f} s, {peaks[0]:.1f} GiB | {seconds[1]:.1f} s, {peaks[1]:.1f} GiB" in readme
    assert f"generation took {of_generation[0]:.1f} and {of_generation[1]:.1f} s" in readme
    ours, stock = ours_and_stock("step-padding-h200.json", "1.7b")
    assert f"the loss is {stock['loss']:.3f} in stock and {ours['loss']:.3f} here" in readme
    assert f"the gradient norm {stock['grad_norm']:.2f} and {ours['grad_norm']:.2f}" in readme
    seeds = sorted(entry["time_ratio"] for entry in committed("step-seeds-h200.json") if entry["name"] == "ours")
    assert f"between {seeds[0]:.3f} and {seeds[-1]:.3f}, {seeds[2]:.3f} in the median" in readme
    levels = [entry["time_ratio"] for entry in committed("step-levels-h100.json") if "time_ratio" in entry][-3:]
    for place, ratio in zip((3, 2, 1), levels, strict=True):
        assert re.search(rf" {place}\. [^0-9].*: {ratio:.3f}\.", readme.partition("## Where it comes")[2])
    record = json.loads((BENCHMARKS / "results" / "learning-h100.json").read_text(encoding="utf-8"))
    [found] = [line for line in record["comparison"] if (line["value"], line["arm"]) == ("accuracy", "ours")]
    mean, low, high = (f"{100 * found[key]:+.2f}" for key in ("difference", "from", "to"))
    assert f"differs by {mean} points over 16 paired seeds (90% interval {low} to {high})" in readme


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


def test_another_attention_of_stock_stands_beside_the_verdict_and_does_not_decide(benchmark_module, tmp_path):
    def step(**losses):
        return {"step": 1} | {
            kind: dict.fromkeys(report.LOGGED, 1.0 + loss) | {"gradient_error": loss} for kind, loss in losses.items()
        }

    report, records = benchmark_module("_vllm_report"), benchmark_module("records")
    shared = [step(float32=0.0, stock=0.01, null=0.5, fused=0.01)]
    verdict = report.judge(shared)
    assert all(entry["within"] and entry["null"] == pytest.approx(0.5) for entry in verdict.values())
    assert verdict["loss"]["null_apart"] == pytest.approx(0.49)
    larger = report.judge([step(float32=0.0, stock=0.01, null=0.5, fused=0.1)])
    assert not any(entry["within"] for entry in larger.values())
    records.write_record(tmp_path / "vllm.json", {"shared": shared, "verdict": verdict})
    kept = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))
    assert kept["shared"][0]["null"]["gradient_error"] == 0.5


@pytest.mark.parametrize(("has_states", "ratio"), [(True, 0.5), (False, 0.8)])
def test_a_first_step_of_stock_is_compared_with_the_first_of_ours(benchmark_module, has_states, ratio):
    """AdamW has no states before its first step ends, so that later ones take more memory."""
    stock = {"name": "stock", "ms": 2.0, "grad_norm": 1.0, "peak_gib": 20.0, "first_peak_gib": 10.0}
    ours = {"name": "ours", "ms": 1.0, "grad_norm": 1.0, "peak_gib": 10.0, "first_peak_gib": 8.0}
    case = benchmark_module("_step_cases").CASES["0.6b-32k"]
    benchmark_module("_step_report").judge(ours, {**stock, "has_optimizer_states": has_states}, case, "cuda")
    assert ours["memory_ratio"] == ratio


def test_every_figure_is_drawn_from_the_records(benchmark_module, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.close("all")
    benchmark_module("figures").main(tmp_path)
    drawn = [pyplot.figure(number) for number in pyplot.get_fignums()]
    assert all(axes.has_data() for figure in drawn for axes in figure.axes)
    pyplot.close("all")
    committed = {path.name for path in (BENCHMARKS / "figures").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    assert len(committed) == len(drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in tmp_path.iterdir())


@pytest.fixture
def one_thread():
    """Such small models gain nothing from a second one, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def committed(name):
    return json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))["results"]


@pytest.mark.nightly
def test_what_goes_through_the_model_is_counted_as_in_the_record(benchmark_module, one_thread, tmp_path):
    forwards = benchmark_module("forwards")
    try:
        forwards.main(tmp_path / "record.json")
    finally:  # what it changes is for a process of its own
        forwards.LIBRARIES.discard(forwards.__name__)
        mock.patch.stopall()
    assert json.loads((tmp_path / "record.json").read_text())["results"] == committed("forwards-cpu.json")


@pytest.mark.nightly
def test_a_cut_into_micro_batches_is_compared_as_in_the_record(benchmark_module, one_thread, tmp_path):
    with pytest.raises(typer.Exit) as exit_info:
        benchmark_module("micro_batches").main(["dapo", "bnpo"], [8, 32], tmp_path / "record.json")
    assert exit_info.value.exit_code == 0
    found = json.loads((tmp_path / "record.json").read_text())["results"]
    assert all(entry.pop("right") for entry in found)
    recorded = {(entry["loss_type"], entry["micro_batch"]): entry for entry in committed("micro-batches-cpu.json")}
    for entry in found:
        expected = recorded[entry["loss_type"], entry["micro_batch"]]
        for name in ("stock", "ours"):
            assert entry[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert len(found) == 4


@pytest.mark.nightly
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
        assert ours["layout"] in {"packed", "padded"}


@pytest.mark.nightly
def test_long_sequences_are_compared_and_large_tensors_seen(tmp_path):
    path = tmp_path / "record.json"
    run_script("long_sequences.py", "--size", "tiny", "--device", "cpu", "--json", str(path))
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert all(entry["right"] for entry in results)
    one_row = [entry for entry in results if entry["name"] == "one row"]
    assert [entry["case"] for entry in one_row] == ["wide-mlp", "wide-heads"]
    assert all(entry["exceeding"] and entry["distance"] < 1e-5 for entry in one_row)


@pytest.mark.nightly
def test_four_bit_weights_are_compared_and_recorded(tmp_path):
    pytest.importorskip("bitsandbytes")
    path = tmp_path / "record.json"
    run_script("engines.py", "--case", "qlora", "--size", "tiny", "--device", "cpu", "--json", str(path))
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [entry["name"] for entry in results] == ["stock, float32", "ours, float32", "stock", "ours"]
    assert all(entry["right"] and entry["level"] == "window" for entry in results[1::2])
    assert max(results[1]["errors"].values()) < 1e-5


def test_a_stopwatch_keeps_no_faster_path_from_a_trainer(benchmark_module, tmp_path):
    importers = [
        name
        for name, module in sys.modules.items()
        if name.startswith("trl_fused_grpo.") and hasattr(module, "replaced_method")
    ]
    trainer = make_trainer(tmp_path)
    try:
        benchmark_module("_accumulation").Stopwatch(trainer, "cpu")
        assert "_get_per_token_logps_and_entropies" in vars(trainer)
        assert trainer._fused.look().level == Level.WINDOW
        assert [name for name in importers if not isinstance(sys.modules[name].replaced_method, mock.Mock)] == []
    finally:
        mock.patch.stopall()


def test_a_clock_of_phases_sees_all_of_a_step_and_keeps_no_faster_path(benchmark_module, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3)
    clock = benchmark_module("end_to_end").PhaseClock("cpu")
    trainer.add_callback(clock)
    engine = SimpleNamespace(generate=time.sleep, sync_weights=lambda: engine.generate(0.1))
    with clock.watching(engine):
        trainer.train()
        clock.enter("scoring")
        engine.sync_weights()
    assert len(clock.steps) == 3
    for step in clock.steps:
        phases = {phase for phase, seconds in step["seconds"].items() if seconds > 0}
        assert phases == {"scoring", "training", "optimizer", "other"}
        assert 0 < step["tokens"] <= 4 * step["longest"] and 0 <= step["padding"] < 1
    assert clock.phase == "scoring" and clock.seconds["generation"] > 0.1 > clock.seconds["synchronisation"]
    assert trainer._fused.ladder.level == Level.WINDOW


def test_the_largest_batch_that_fits_is_found(benchmark_module):
    memory = benchmark_module("memory")
    peaks, largest = memory.peaks_and_largest(lambda rows: float(rows) if rows <= 21 else None, 512)
    assert peaks == {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0} and largest == 21
    assert memory.peaks_and_largest(lambda rows: 1.0, 4) == ({1: 1.0, 2: 1.0, 4: 1.0}, 4)
    assert memory.peaks_and_largest(lambda rows: None, 4) == ({}, 0)


def test_larger_and_larger_batches_are_tried_where_none_can_follow_a_failure(benchmark_module):
    memory = benchmark_module("memory")

    def tried(peak, most=512):
        return list(memory.growing_peaks(peak, most, 36.0))

    def rows(peak, most=512):
        return [rows for rows, _ in tried(peak, most)]

    assert rows(lambda rows: 5 + rows / 2) == [1, 2, 4, 8, 16, 32, 47, 54, 58, 60]  # 62 would fill it
    assert tried(lambda rows: 10 + 8 * rows if rows < 4 else None) == [(1, 18), (2, 26)]
    assert tried(lambda rows: None) == []
    assert rows(lambda rows: 0.0, 5) == [1, 2, 4, 5]  # a CPU has no figures


def test_memory_is_compared_at_every_common_batch(benchmark_module):
    dense = {"case": "a", "name": "dense, TRL 0.27.2", "peaks": {"1": 20.0, "2": 20.0}, "largest": 2}
    stock = {"case": "a", "name": "stock", "peaks": {"1": 12.0, "2": 12.5, "4": 16.0}, "largest": 5}
    other = {"case": "b", "name": "stock", "peaks": {"1": 1.0}, "largest": 1}
    failed = {"case": "a", "name": "Liger loss, TRL 0.27.2", "failed": "out of memory"}
    ours = {"case": "a", "name": "ours", "peaks": {"1": 10.0, "2": 11.0, "4": 12.0}, "largest": 9}
    memory, kept = benchmark_module("memory"), dict(ours)
    *rest, found = memory.judged([dense, stock, other, failed, ours])
    assert (rest, ours) == ([dense, stock, other, failed], kept)
    assert found["peak_ratio"] == {
        "dense, TRL 0.27.2": {"1": 0.5, "2": 0.55},
        "stock": {"1": 0.833, "2": 0.88, "4": 0.75},
    }
    assert found["largest_ratio"] == {"dense, TRL 0.27.2": 4.5, "stock": 1.8}
    assert found["met"]

    def is_met(**changes):
        return memory.judged([dense, stock, ours | changes])[-1]["met"]

    assert not is_met(peaks={"1": 10.0, "2": 11.3, "4": 12.0})  # 0.904 of stock's
    assert not is_met(peaks={"1": 12.1, "2": 11.0, "4": 12.0})
    assert not is_met(largest=3)
    assert memory.judged([{"case": "a", "name": "ours", "peaks": {"1": 0.0}}]) == [
        {"case": "a", "name": "ours", "peaks": {"1": 0.0}}
    ]


def test_what_is_said_of_the_measured_memory_is_what_is_judged_today(benchmark_module):
    results = json.loads((BENCHMARKS / "results" / "memory-h200.json").read_text())["results"]
    assert benchmark_module("memory").judged(results) == results


def test_every_batch_holds_the_longest_completion(benchmark_module):
    rollout_module, memory = benchmark_module("_rollout"), benchmark_module("memory")
    rollout = rollout_module.Rollout.make(rollout_module.Lengths(), 4, 8, 1000, 0)
    sorted_rows = memory.longest_first(rollout)
    assert len(sorted_rows.completions[0]) == max(map(len, rollout.completions))
    assert sorted(map(tuple, sorted_rows.completions)) == sorted(map(tuple, rollout.completions))
    groups = [sorted_rows.prompts[row : row + 8] for row in range(0, 32, 8)]
    assert all(group == group[:1] * 8 for group in groups)


def test_a_series_that_grows_is_told_from_one_that_varies(benchmark_module):
    growth = benchmark_module("_growth")
    flat = {"seconds": 0.2, "graphs": 3, "caches": 7, "tensors": 90, "objects": 1000}

    def judged(**series):
        samples = [
            {"step": step, **flat, "rss_mib": 600 + step % 7, **{name: of(step) for name, of in series.items()}}
            for step in range(10, 1001, 10)
        ]
        return growth.judged(samples, warm_up=200)

    assert judged()["right"]
    assert not judged(rss_mib=lambda step: 600 + 0.02 * step)["right"]
    assert not judged(graphs=lambda step: 3 + (step > 900))["right"]
    assert not judged(tensors=lambda step: 90 + step // 100)["right"]
    assert not judged(seconds=lambda step: 0.2 + 1e-4 * step)["right"]
    assert judged(seconds=lambda step: 0.2 + 0.1 * (step % 70 == 0))["right"]
    assert judged(reserved_mib=lambda step: 70 + 20 * (step > 600))["right"]
    assert not judged(reserved_mib=lambda step: 70 + 20 * (step > 400) + 20 * (step > 700))["right"]
    # Taken and given back, as after exceptions
    assert judged(reserved_mib=lambda step: 68 + 44 * (step % 300 < 150))["right"]
    assert not judged(reserved_mib=lambda step: 68 + 44 * (step % 300 < 150) + 0.08 * step)["right"]


def test_a_matrix_records_what_each_job_did(benchmark_module, tmp_path):
    matrix = benchmark_module("gpu_matrix")

    def job(name, code, **more):
        return matrix.Job(name, [sys.executable, "-c", code], **more)

    path = tmp_path / "record.json"
    start = {"commit": "abc", "device": "CPU", "versions": {}}
    names = ["one", "two", "three", "four", "five"]
    running = matrix.Matrix(tmp_path, 1, start, names, path)
    passed = running.run(job("one", "print('3 passed in 1 s'); print('bye')"))
    assert passed["right"]
    assert passed["counts"] == "3 passed in 1 s"
    failed = running.run(job("two", "raise SystemExit('1 failed')"))
    assert (failed["right"], failed["exit_code"], failed["counts"]) == (False, 1, "1 failed")
    late = running.run(job("three", "import time; time.sleep(60)", minutes=0.02))
    assert (late["right"], late["exit_code"]) == (False, None)
    details = "import json; json.dump({'results': [{'name': 'a'}]}, open('{json}', 'w'))"
    running.run(job("four", details, keeps_results=True))
    record = json.loads(path.read_text())
    assert record["failed"] == ["two", "three"] and record["not_run"] == ["five"]
    assert [entry["name"] for entry in record["jobs"]] == ["one", "two", "three", "four"]
    assert record["jobs"][-1]["results"] == [{"name": "a"}]

    later = matrix.Matrix(tmp_path, 1, {**start, "commit": "def"}, names, path)
    later.run(job("two", "print('1 passed')"))
    record = json.loads(path.read_text())
    assert record["failed"] == ["three"]
    assert [entry["commit"] for entry in record["jobs"]] == ["abc", "def", "abc", "abc"]
    with pytest.raises(typer.BadParameter, match="has other versions"):
        matrix.Matrix(tmp_path, 1, {**start, "versions": {"torch": "2"}}, names, path)


@pytest.mark.parametrize("visible", [None, "4,5,6,7"])
def test_jobs_of_a_matrix_take_the_least_busy_gpus(benchmark_module, tmp_path, monkeypatch, visible):
    matrix = benchmark_module("gpu_matrix")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    first, second, third, fourth = (visible or "0,1,2,3").split(",")
    one, two = matrix.Job("one", gpus=1), matrix.Job("two", gpus=2)
    running = matrix.Matrix(tmp_path, 1, {"commit": "abc", "gpus": 4}, [])
    with running.visible(two) as pair, running.visible(two) as other, running.visible(one) as alone:
        assert [gpus["CUDA_VISIBLE_DEVICES"] for gpus in (pair, other, alone)] == [
            f"{first},{second}",
            f"{third},{fourth}",
            first,
        ]
        with running.visible(two) as pair:
            assert pair["CUDA_VISIBLE_DEVICES"] == f"{second},{third}"
    code = "import os; print('3 of', os.environ['CUDA_VISIBLE_DEVICES'])"
    assert running.run(matrix.Job("job", [sys.executable, "-c", code]))["counts"] == f"3 of {first}"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with matrix.Matrix(tmp_path, 1, {"commit": "abc", "gpus": 1}, []).visible(one) as gpus:
        assert gpus == {}  # all that there are


def test_jobs_of_a_matrix_are_chosen_by_their_names(benchmark_module):
    matrix = benchmark_module("gpu_matrix")
    jobs = matrix.jobs_of("cuda", random_cases=10, seed=1, soak_steps=50, processes=2)
    assert len({job.name for job in jobs}) == len(jobs)
    chosen = matrix.selected(jobs, only=["faults", "soak"], skip=["stock", "lora"])
    assert [job.name for job in chosen] == ["faults default", "soak default", "soak compile"]
    files = {job.command[-1] for job in jobs}
    assert {"tests/ops/test_triton_kernels.py", "tests/training/test_gpu.py"} <= files
