"""The census of architectures in the docs is the recorded one, and what it says of some architectures still holds."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import transformers


ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "census.json").read_text(encoding="utf-8"))
SOME = (
    "DeepseekV3ForCausalLM",
    "GPTJForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MambaForCausalLM",
    "OPTForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)


@pytest.fixture
def census(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("census")


def test_the_docs_have_the_recorded_census(census):
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert page == census.write_page(page, RECORD)


def test_the_summary_counts_the_entries():
    layouts = Counter(entry["layout"] for entry in RECORD["architectures"])
    assert {layout: count for layout, count in RECORD["summary"].items() if count} == dict(layouts)
    assert RECORD["built"] == len(RECORD["architectures"])


def test_no_architecture_is_kept_from_packing_for_being_composite():
    assert not [e["class"] for e in RECORD["architectures"] if "composite" in e.get("reason", "")]


@pytest.mark.parametrize("name", SOME)
def test_an_architecture_still_gets_the_recorded_layout(name, census):
    if transformers.__version__ != RECORD["transformers"]:
        pytest.skip(f"the census was taken with transformers {RECORD['transformers']}")
    assert census.examine(name) in RECORD["architectures"]
