"""
Time and memory of one accumulation window without generation: stock GRPOTrainer and FusedGRPOTrainer in one process on
one model and the same 32 completions. Each trainer's own `training_step` runs: old log-probs where the trainer needs
them, then forward and backward of every micro-batch. The sampler's log-probs are made up; both trainers take them for
vLLM's. Each faster path is also switched off alone. Gradients are compared with stock's, and with `--truth` both are
compared with stock in float32.

    python benchmarks/window.py --size 0.6b --size 4b --truth --json window.json
    python benchmarks/window.py --size 4b --lora --no-levers --json window-lora.json
    python benchmarks/window.py --size tiny --device cpu
"""

import json
import os
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _accumulation import LENGTHS, MODE, ROWS, AccumulationBenchmark, Contender, Stopwatch
from _measure import environment, timed
from _rollout import Lengths
from _trainers import SHAPES, clear_memory
from records import write_record
from rich.console import Console
from rich.table import Table


# The most time relative to stock that one accumulation window is meant to take: by default, and in the largest
# micro-batches that fit into the memory of stock
TARGETS = {"0.6b": (0.28, 0.20), "4b": (0.23, 0.20), "4b-lora": (0.24, None)}
SMALL_LOGITS_MIB = 128
NORM_RTOL = {"cuda": 1e-3, "cpu": 1e-5}
ERROR_SLACK = 1.1  # our error may be this many times that of stock: both are rounding noise of one size

app = typer.Typer(add_completion=False)
console = Console(width=170)


# Any option beside `use_reentrant` keeps torch's checkpointing; this one is its default
TORCHS_OWN = {"use_reentrant": False, "determinism_check": "default"}

ALONE = {"fused_max_tokens_per_forward": 0}

LEVERS = (
    Contender("padded rows instead of packed", options={"fused_layout": "padded"}),
    Contender("with old log-probs before training", options={"fused_skip_old_logps": False}),
    Contender("every copy of a prompt", options={"fused_share_prompts": False}),
    Contender("every micro-batch alone in the model", options=ALONE),
    Contender("torch's gradient checkpointing", options={"gradient_checkpointing_kwargs": TORCHS_OWN}),
    Contender("the same, reentrant", options={"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    Contender(
        "ratio per sequence, TRL's default",
        options={"vllm_importance_sampling_mode": "sequence_mask"},
        comparable=False,
    ),
)


# They replace layers of the model for good, so they come last and are compared with each other
LAYER_KERNELS = (
    Contender("stock, Liger's layers", fused=False, options={"use_liger_kernel": True}),
    Contender("ours, Liger's layers", options={"use_liger_kernel": True}),
    Contender("ours, Liger's layers, micro-batches of 8", micro_batch=8, options={"use_liger_kernel": True}),
)


def enlarged(benchmark: AccumulationBenchmark, limit: float | None) -> Contender:
    """The largest micro-batch, with its chunk of logits, whose peak is at most `limit` GiB."""
    small = {"fused_logits_mib": SMALL_LOGITS_MIB}
    candidates = [
        Contender("micro-batches of 16", micro_batch=16),
        Contender("micro-batches of 16, small chunks of logits", micro_batch=16, options=small),
        Contender("micro-batches of 8", micro_batch=8),
        Contender("micro-batches of 8, small chunks of logits", micro_batch=8, options=small),
    ]
    if limit is None:
        return candidates[2]
    for contender in candidates[:-1]:
        peak = benchmark.run(contender, 1)["peak_gib"]
        console.print(f"{contender.name}: {peak:.2f} GiB, stock's peak is {limit:.2f}")
        if peak <= limit:
            return contender
    return candidates[-1]


def launch_us() -> float:
    """Microseconds of one launch of a small kernel. Small models in small micro-batches wait for launches."""
    tensor, launches = torch.ones(8, device="cuda"), 5000

    def launch() -> None:
        for _ in range(launches):
            tensor * 2

    return min(timed(launch, lambda: None, "cuda", lead_in=1) for _ in range(3)) / launches * 1e3


def profile(benchmark: AccumulationBenchmark, contender: Contender, path: Path) -> None:
    """Write a profile of two micro-batches."""
    trainer = benchmark.build(contender)
    benchmark.rollout.serve(trainer)
    examples = [trainer.train_dataset[0]] * ROWS

    def step() -> None:
        trainer.training_step(trainer.model_wrapped, examples, None)

    with benchmark.shared.running(trainer):
        for _ in range(4):
            step()
        clock = Stopwatch(trainer, benchmark.device)
        clock.start()
        step()
        plain = clock.stop()
        with torch.profiler.profile() as profiler:
            step()
            step()
            clock.stop()
    benchmark.shared.drop_gradients()
    averages = profiler.key_averages()
    kernels = sum(e.self_device_time_total for e in averages if e.device_type != torch.autograd.DeviceType.CPU)
    tables = [averages.table(sort_by=key, row_limit=40) for key in ("self_cpu_time_total", "self_device_time_total")]
    lines = [f"one micro-batch: {plain * 1e3:.1f} ms; kernels of the next two: {kernels / 1e3:.1f} ms", *tables]
    path.write_text("\n".join(lines))


def compare(
    size: str, lora: bool, device: str, repeats: int, stock_repeats: int, levers: bool, truth: bool, seed: int
) -> list[dict]:
    """Run all contenders at one size; one record each."""
    benchmark = AccumulationBenchmark(size, lora, device, seed)
    rollout = benchmark.rollout
    console.print(
        f"[bold]{size}{' LoRA' if lora else ''}[/]: {ROWS} completions, {rollout.tokens} tokens in {rollout.width} "
        f"columns, {rollout.padding:.1%} padding"
    )
    if truth:
        benchmark.find_truth()
    records = [benchmark.run(Contender("stock", fused=False), stock_repeats)]
    if records[0]["not_finite"] or (levers and device == "cuda"):
        # How far the gradients of stock move with another of SDPA's backends
        records.append(benchmark.run(Contender("stock without cuDNN's attention", fused=False, backend="no-cudnn"), 1))
    records.append(benchmark.run(Contender("ours"), repeats))
    target, enlarged_target = TARGETS.get(size + "-lora" * lora, (None, None))
    targets = {"ours": target}
    if levers:
        contender = enlarged(benchmark, records[0]["peak_gib"])
        targets[contender.name] = enlarged_target
        records.append(benchmark.run(contender, repeats))
        records += [benchmark.run(lever, min(repeats, 2)) for lever in LEVERS]
        records += [benchmark.run(kernels, min(repeats, 2)) for kernels in LAYER_KERNELS if device == "cuda"]
    for record in records:
        record |= {"size": size, "lora": lora, "tokens": rollout.tokens, "width": rollout.width}
        judge(record, records[0], targets.get(record["name"]), device)
    return records


def judge(record: dict, stock: dict, target: float | None, device: str) -> None:
    """Add time and memory relative to stock, and whether gradients are right and the target is met."""
    record["time_ratio"] = record["ms"] / stock["ms"]
    record["memory_ratio"] = memory = record["peak_gib"] / stock["peak_gib"] if device == "cuda" else None
    if "error" in record and "error" in stock:
        is_close = record["error"] <= ERROR_SLACK * stock["error"]
    else:
        is_close = record.get("norm_difference", 0.0) <= NORM_RTOL[device]
    record["right"] = record["not_finite"] == 0 and is_close
    if target is not None:
        record["target"] = target
        fits = memory is None or round(memory, 3) <= 1.0
        record["met"] = record["right"] and fits and round(record["time_ratio"], 3) <= target


def print_records(records: list[dict], title: str) -> None:
    """One row per contender."""
    table = Table(title=title)
    for column in (
        "trainer",
        "ms",
        "all",
        "time",
        "peak GiB",
        "memory",
        "target",
        "norm, stock",
        "norm, fp32",
        "error, fp32",
        "NaN",
        "recomputed",
    ):
        table.add_column(column, justify="left" if column == "trainer" else "right", no_wrap=True)

    def number(record: dict, key: str, spec: str) -> str:
        return format(record[key], spec) if record.get(key) is not None else ""

    for record in records:
        color = "" if "met" not in record else "[green]" if record["met"] else "[red]"
        times = record["all_ms"]
        table.add_row(
            record["name"],
            number(record, "ms", ".0f"),
            f"{min(times):.0f} to {max(times):.0f}",
            color + number(record, "time_ratio", ".3f"),
            number(record, "peak_gib", ".2f"),
            number(record, "memory_ratio", ".3f"),
            number(record, "target", ".2f"),
            ("" if record["right"] else "[red]") + number(record, "norm_difference", ".1e"),
            number(record, "norm_error", ".1e"),
            number(record, "error", ".2e"),
            f"{record['not_finite']} of {record['tensors']}",
            number(record, "recomputed", ".3f"),
        )
    console.print(table)


@app.command()
def main(
    size: Annotated[list[str], typer.Option(help=f"{', '.join(SHAPES)}; repeatable")],
    lora: Annotated[
        bool, typer.Option("--lora", help="train adapters of rank 16 on the attention projections")
    ] = False,
    repeats: Annotated[int, typer.Option(help="accumulation windows that count", min=1)] = 5,
    stock_repeats: Annotated[int, typer.Option(help="the same for stock", min=1)] = 2,
    levers: Annotated[
        bool, typer.Option(help="also in larger micro-batches, and with each faster path off alone")
    ] = True,
    truth: Annotated[bool, typer.Option(help="also judge gradients by float32 ones; a minute at 4b")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="of lengths, tokens and noise; 6 pads as most seeds do: 67%")] = 6,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, else the last line")] = None,
    profile_path: Annotated[
        Path | None, typer.Option("--profile", help="only profile two micro-batches of ours")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare windows; exits 1 when a gradient of ours is wrong."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore", FutureWarning)
    record: dict[str, Any] = {**environment(device, commit), "seed": seed, "sampling_mode": MODE, "results": []}
    record["versions"] |= {"accelerate": metadata.version("accelerate")}
    record["launch_us"] = launch_us() if device == "cuda" else None
    record["lengths"] = {name: asdict(LENGTHS.get(name, Lengths())) for name in size}
    for name in size:
        if profile_path is not None:
            profile(AccumulationBenchmark(name, lora, device, seed), Contender("ours", options=ALONE), profile_path)
            continue
        records = compare(name, lora, device, repeats, stock_repeats, levers, truth, seed)
        print_records(records, f"{name}{' LoRA' if lora else ''}, one accumulation window of {ROWS} completions")
        record["results"] += records
        clear_memory()
        if json_path is not None:
            write_record(json_path, record)
    if json_path is None and profile_path is None:
        print(json.dumps(record))
    if not all(entry["right"] for entry in record["results"] if not entry["name"].startswith("stock")):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
