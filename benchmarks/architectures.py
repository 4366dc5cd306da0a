"""
Time and memory of whole optimizer steps of many architectures: stock GRPOTrainer and FusedGRPOTrainer in one process,
in turns, on one model with float32 weights and the same completions. Forward and backward of every micro-batch,
gradient clipping and AdamW count; generation does not. All options are TRL's defaults but for the sampler, whose
log-probs are made up so that vLLM's correction is on. A model that fails is recorded, and the others go on.

    python benchmarks/architectures.py --json benchmarks/results/architectures-h200.json
    python benchmarks/architectures.py --model qwen3-vl-text --model lfm2
    python benchmarks/architectures.py --size tiny --device cpu
"""

import json
import os
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _accumulation import LENGTHS, MODE, ROWS
from _architecture_models import make_architecture
from _architectures import ARCHITECTURES
from _measure import environment
from _rollout import Lengths
from _steps import StepBenchmark, now, tokens_and_padding, wanted
from _trainers import clear_memory
from records import write_record
from rich.console import Console
from rich.table import Table


FORCED_TARGET = 1.0  # rows as TRL pads them are never slower than stock
# Under autocast both round to bfloat16 in an order of their own, and a router may choose another expert
NORM_RTOL = {"cuda": 1e-2, "cpu": 1e-5}

app = typer.Typer(add_completion=False)
console = Console(width=170)


def run_model(
    name: str,
    size: str,
    device: str,
    repeats: int,
    stock_repeats: int,
    layers: int | None,
    mode: str,
    seed: int,
    arms: list[dict[str, Any]],
    profile: Path | None,
) -> list[dict[str, Any]]:
    """The records of one model; a model that cannot be built or fed gives one record that says why."""
    architecture, start = ARCHITECTURES[name], now()
    try:
        model = make_architecture(architecture, size, device, layers)
        lengths = LENGTHS.get(size, Lengths())
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        attention = model.config.get_text_config()._attn_implementation
        options = {"vllm_importance_sampling_mode": mode}
        benchmark = StepBenchmark(model, architecture, lengths, ROWS, device, size, seed, options)
        del model
        rollout = benchmark.rollout
        console.print(
            f"[bold]{name}[/]: {parameters:.0f} million parameters, {rollout.tokens} tokens in {rollout.width} columns"
        )
        runners = wanted(repeats, stock_repeats, architecture.forced, arms=arms)
        records = benchmark.compare(runners)
        for number, runner in enumerate(runners):
            if profile is not None and "failed" not in runner.record:
                benchmark.profile(runner, profile / f"{name}-{number}.json.gz")
        about = {"millions": round(parameters), "attention": attention, **tokens_and_padding(rollout)}
    except Exception as error:
        console.print(f"[red]{name} failed[/]")
        traceback.print_exc(limit=-5)
        return [
            {"model": name, "name": "stock", "micro_batch": None, "failed": f"{type(error).__name__}: {error}"[:300]}
        ]
    for record in records:
        record |= {"model": name, **about, "layers": layers}
        judge(record, records[0], architecture.target, device)
    console.print(f"{name}: {now() - start:.0f} s in all")
    return records


def judge(record: dict[str, Any], stock: dict[str, Any], target: float | None, device: str) -> None:
    """Add time and memory relative to stock, and whether gradients are right and the target is met."""
    if record is stock or "ms" not in record or "ms" not in stock:
        return
    record["right"] = record["norm_difference"] <= NORM_RTOL[device] and record["without_gradient_differ"] == 0
    record["time_ratio"] = record["ms"] / stock["ms"]
    record["memory_ratio"] = record["peak_gib"] / stock["peak_gib"] if device == "cuda" else None
    target = FORCED_TARGET if "fused_layout" in record["options"] else target
    fits = record["memory_ratio"] is None or round(record["memory_ratio"], 2) <= 1.0
    if target is not None:
        record["target"] = target
        record["met"] = record["right"] and fits and round(record["time_ratio"], 3) <= target


def print_records(records: list[dict[str, Any]]) -> None:
    """One row per contender."""
    table = Table(title="Whole optimizer steps")
    columns = (
        "model",
        "trainer",
        "layout",
        "ms",
        "all",
        "time",
        "target",
        "met",
        "peak GiB",
        "memory",
        "norm",
        "distance",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right", no_wrap=True)

    def number(record: dict[str, Any], key: str, spec: str) -> str:
        return format(record[key], spec) if record.get(key) is not None else ""

    for record in records:
        if "failed" in record:
            table.add_row(record["model"], record["name"], "[red]failed")
            continue
        times = record["all_ms"]
        met = record.get("met")
        right = record.get("right", True)
        table.add_row(
            record["model"],
            record["name"],
            record.get("layout", ""),
            number(record, "ms", ".0f"),
            f"{min(times):.0f} to {max(times):.0f}",
            number(record, "time_ratio", ".3f"),
            number(record, "target", ".2f"),
            "" if met is None else "[green]yes" if met else "[red]no",
            number(record, "peak_gib", ".2f"),
            number(record, "memory_ratio", ".3f"),
            ("" if right else "[red]") + number(record, "norm_difference", ".1e"),
            number(record, "distance", ".1e"),
        )
    console.print(table)
    for record in records:
        if "failed" in record:
            print(f"{record['model']}, {record['name']}: {record['failed']}")


@app.command()
def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ARCHITECTURES)}; repeatable; all of them by default")
    ] = None,
    size: Annotated[str, typer.Option(help="real or tiny")] = "real",
    repeats: Annotated[int, typer.Option(help="steps that count", min=1)] = 3,
    stock_repeats: Annotated[int, typer.Option(help="the same for stock and for forced layouts", min=1)] = 2,
    arm: Annotated[list[str] | None, typer.Option(help="further options of ours, as JSON; repeatable")] = None,
    layers: Annotated[int | None, typer.Option(help="layers instead of the model's", min=1)] = None,
    mode: Annotated[str, typer.Option(help="vllm_importance_sampling_mode; TRL's default is sequence_mask")] = MODE,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="of lengths, tokens and noise; 19 pads 76%, 6 pads 67%")] = 19,
    profile: Annotated[Path | None, typer.Option(help="folder for a trace of one more step of each trainer")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, else the last line")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare models; exits 1 when one fails or a gradient of ours is wrong."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore", FutureWarning)
    names = model or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        raise typer.BadParameter(f"no model {sorted(unknown)}: one of {', '.join(ARCHITECTURES)}")
    record: dict[str, Any] = {**environment(device, commit), "seed": seed, "sampling_mode": mode, "results": []}
    record["lengths"] = asdict(LENGTHS.get(size, Lengths()))
    for name in names:
        arms = [json.loads(text) for text in arm or []]
        record["results"] += run_model(name, size, device, repeats, stock_repeats, layers, mode, seed, arms, profile)
        clear_memory()
        if json_path is not None:
            write_record(json_path, record)
    print_records(record["results"])
    if json_path is None:
        print(json.dumps(record))
    if not all(entry.get("right", entry["name"] == "stock") and "failed" not in entry for entry in record["results"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
