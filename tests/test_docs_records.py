"""The numbers in README and docs/benchmarks.md are those of the records."""

import importlib
import json
import re

import pytest

from tests.docs_pages import ROOT
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL


def measured(record, **wanted):
    """Time and memory of each trainer in a record, as the pages have them; stock's are the first."""
    results = json.loads((ROOT / "benchmarks/results" / record).read_text())["results"]
    results = [entry for entry in results if wanted.items() <= entry.items()]
    return {entry["name"]: f"{entry['ms']:.0f} ms, {entry['peak_gib']:.2f} GiB" for entry in results}


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("0.6b", "Qwen3-0.6B"),
        ("1.7b", "Qwen3-1.7B"),
        ("4b", "Qwen3-4B"),
        ("1.7b-lora-beta", "Qwen3-1.7B, LoRA, `beta=0.04`"),
        ("1.7b-lora-bf16", "Qwen3-1.7B, LoRA, bfloat16 weights"),
    ],
)
def test_time_and_memory_of_a_step_are_those_of_the_record(page, case, shown):
    of_case = measured("step-h100.json", case=case)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"| {shown} | {of_case['stock']} | {of_case['ours']} (" in text


@pytest.mark.parametrize("name", ["0.6B", "4B", "4B, LoRA"])
def test_time_and_memory_of_an_accumulation_window_are_those_of_the_record(name):
    of_window = measured(f"window-{name.lower().replace(', ', '-')}-h200.json")
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"| Qwen3-{name} | {of_window['stock']} | {of_window['ours']}" in page


def test_what_goes_through_the_model_is_that_of_the_record():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for entry in json.loads((ROOT / "benchmarks/results/forwards-cpu.json").read_text())["results"]:
        cells = [f"{calls}, {tokens}" for calls, tokens in zip(entry["forwards"], entry["tokens"], strict=True)]
        name = entry["name"].removeprefix("ours, ")
        shown = f"`{name}`" if "=" in name else name
        assert f"| {shown} | {cells[0]} | {cells[1]} |" in page


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("ratio", "vLLM's importance ratios"),
        ("normalizer", "the normalizer of the whole batch"),
        ("tool-mask", "tokens written by a tool"),
        ("kl", "bias-corrected KL"),
        ("delta", "`delta`"),
    ],
)
def test_what_the_liger_loss_leaves_out_is_that_of_the_record(case, shown):
    record = json.loads((ROOT / "benchmarks/results/issue-1082-trl-0.27.2.json").read_text())
    [of_case] = [entry for entry in record["cases"] if entry["name"] == f"issue-1082-{case}"]
    liger = "refused"
    if "liger" not in of_case:
        digits = 3 if of_case["liger_ratio"] < 10 else 0
        liger = f"{of_case['liger_ratio']:.{digits}f}, {of_case['liger_error']:.{digits}f}"
    ours = f"{of_case['fused_ratio']:.3f}, {of_case['gradient_error']:.1e}"
    assert re.search(rf"\| {re.escape(shown)}.* \| {liger} \| {ours} \|", (ROOT / "README.md").read_text())


def record_of(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def test_the_equivalence_in_the_readme_is_that_of_the_record():
    record = record_of("learning-h100.json")
    [ours] = [e for e in record["comparison"] if (e["value"], e["arm"]) == ("accuracy", "ours")]
    assert ours["equivalent"] and ours["p"] < 0.05 and record["margin"] == 0.01
    seeds = len({entry["seed"] for entry in record["results"]})
    difference, low, high = (f"{100 * ours[name]:+.2f}" for name in ("difference", "from", "to"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"over {seeds} paired seeds accuracy differs by {difference} points (90% interval {low} to {high}), "
        f"equivalence within one point p = {ours['p']:.2g}."
    ) in readme
    assert f"Accuracy and entropy over {seeds} seeds" in readme


@pytest.mark.parametrize("name", ["learning-h100.json", "learning-h200.json", "replay-h200.json"])
def test_what_is_learnt_is_that_of_the_record(name, monkeypatch):
    record, script = record_of(name), name.split("-")[0]
    if TRL < NEWEST_TRL:
        pytest.skip("benchmarks and examples are written for the newest TRL")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(script)
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for row in [list(module.COLUMNS), *module.rows_of_table(record)]:
        assert re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(row)} |") in page


MEMORY_ROWS = {
    "0.6b-float32": "0.6B, float32 weights",
    "0.6b-bfloat16": "0.6B, bfloat16 weights",
    "0.6b-lora": "0.6B, LoRA",
    "1.7b-lora": "1.7B, LoRA",
    "4b-lora": "4B, LoRA",
    "8b-lora": "8B, LoRA",
}


CONTENDERS = ("dense, TRL 0.27.2", "Liger loss, TRL 0.27.2", "stock", "ours")
PEAK_TARGETS = {"dense, TRL 0.27.2": 0.60, "stock": 0.90}


def memory_of(case):
    results = json.loads((ROOT / "benchmarks/results/memory-h200.json").read_text())["results"]
    return {entry["name"]: entry for entry in results if entry["case"] == case}


@pytest.mark.parametrize("case", MEMORY_ROWS)
def test_the_largest_batch_is_that_of_the_record(case):
    of_case = memory_of(case)
    cells = [MEMORY_ROWS[case], *(str(of_case[name].get("largest", "failed")) for name in CONTENDERS)]
    for name in PEAK_TARGETS:
        rows, ratio = list(of_case["ours"]["peak_ratio"][name].items())[-1]
        cells.append(f"{ratio:.2f} ({rows})")
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", MEMORY_ROWS)
def test_peaks_at_equal_batch_and_missed_targets_are_those_of_the_record(case):
    ratios, cells = memory_of(case)["ours"]["peak_ratio"], [MEMORY_ROWS[case]]
    for rows in ("1", "2", "4", "8", "16", "32"):
        found = {name: ratios[name].get(rows) for name in PEAK_TARGETS}
        shown = [
            "-" if ratio is None else f"**{ratio:.3f}**" if ratio > PEAK_TARGETS[name] else f"{ratio:.3f}"
            for name, ratio in found.items()
        ]
        cells.append(", ".join(shown) if any(found.values()) else "")
    row = re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(cells)} |")
    assert row in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("record", "after", "arms"),
    [
        (
            "cpu",
            None,
            {"ours": "ours", "ours, padded": 'ours, `fused_layout="padded"`', "stock, eager attention": None},
        ),
        ("h200", 0, {"ours": None, "stock, eager attention": None}),
        ("after-h200", 256, {"ours": None, "stock, eager attention": None}),
        ("after-h200", 512, {"ours": None, "stock, eager attention": None}),
    ],
)
def test_drawn_cases_beside_another_attention_are_those_of_the_record(record, after, arms):
    results = [
        entry for entry in record_of(f"rounding-drawn-{record}.json")["results"] if entry.get("after", after) == after
    ]
    assert [entry["mode"] for entry in results] == ["random:3402:702", "random:3403:472"]
    for arm, name in arms.items():
        cells = [] if after is None else [f"{after + 1} to {after + 256}"]
        cells.append(name or arm)
        for entry in results:
            cells.append(f"{entry['together'][arm] / entry['together']['stock']:.2f}")
            cells.append("{ratio:.2f} ({low:.2f} to {high:.2f})".format(**entry["relative_to_stock"][arm]))
        assert f"| {' | '.join(cells)} |" in (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
