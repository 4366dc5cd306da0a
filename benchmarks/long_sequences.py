"""
Long completions, and packed rows whose tensors have more than 2^31 elements. `long`: completions of up to 32,768 tokens
at the shape of Qwen3-0.6B, stock in micro-batches of one against ours, which packs what its budget of tokens allows and
runs a longer sequence alone. `wide-mlp` and `wide-heads`: one row of so many tokens that the MLP's activations, or the
queries of all heads, exceed 2^31 elements, against the same sequences apart.

    python benchmarks/long_sequences.py --json benchmarks/results/long-sequences-h200.json
    python benchmarks/long_sequences.py --size tiny --device cpu
"""

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _accumulation import MODE, Contender
from _architecture_models import make_architecture
from _architectures import ARCHITECTURES, Architecture
from _measure import environment
from _rollout import Lengths
from _steps import Runner, StepBenchmark, tokens_and_padding
from _trainers import clear_memory
from records import write_record
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode, resolve_name


NORM_RTOL = {"cuda": 1e-2, "cpu": 1e-5}
LOSS_ATOL = {"cuda": 2e-3, "cpu": 1e-6}
INT32 = {"real": 2**31, "tiny": 2**17}  # tiny rows only show that the check works

app = typer.Typer(add_completion=False)
console = Console(width=150)


@dataclass(frozen=True)
class GivenLengths(Lengths):
    """Completions of these lengths, in tokens."""

    completions: tuple[int, ...] = ()

    def draw(self, groups: int, group: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
        prompts, _ = super().draw(groups, group, generator)
        return prompts, list(self.completions)


class LargestResults(TorchFunctionMode):
    """Remembers, for each function of torch that returned more elements than `limit`, the largest shape."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit, self.shapes, self.most = limit, {}, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            elements = result.numel()
            self.most = max(self.most, elements)
            if elements > self.limit:
                name = resolve_name(func) or getattr(func, "__name__", str(func))
                if elements > self.shapes.get(name, torch.Size()).numel() or name not in self.shapes:
                    self.shapes[name] = result.shape
        return result


@dataclass(frozen=True)
class Case:
    """
    Completions on one model, and how they run.

    Args:
        lengths (`dict[str, tuple[int, ...]]`): of completions, `"real"` and `"tiny"`.
        runners (`tuple[tuple[Contender, int], ...]`): contenders and how often each runs, the reference first.
        real (`dict`): changes of the shape of Qwen3-0.6B.
        layers (`int`, *optional*): how many layers instead of all.
        exceeds (`str`, *optional*): the contender whose tensors must exceed 2^31 elements; the reference's must not.
    """

    lengths: dict[str, tuple[int, ...]]
    runners: tuple[tuple[Contender, int], ...]
    real: dict[str, Any] | None = None
    layers: int | None = None
    exceeds: str | None = None

    def architecture(self) -> Architecture:
        """The model."""
        qwen3 = ARCHITECTURES["qwen3-0.6b"]
        return replace(qwen3, real={**qwen3.real, **(self.real or {})}, forced=())


_ALONE = Contender("apart", micro_batch=1, options={"fused_max_tokens_per_forward": 0})
_ROW = Contender("one row", micro_batch=16)
_MANY: dict[str, tuple[int, ...]] = {
    "real": (11_200,) * 15 + (12_500,),
    "tiny": (60,) * 15 + (64,),
}  # 180,500 tokens and prompts
CASES = {
    "long": Case(
        {"real": (32_768, 16_384, 4_096, 1_024), "tiny": (64, 32, 8, 4)},
        (
            (Contender("stock", fused=False, micro_batch=1), 2),
            (Contender("ours", micro_batch=1), 2),
            (Contender("ours, one micro-batch", micro_batch=4), 2),
        ),
    ),
    "wide-mlp": Case(
        _MANY,
        ((_ALONE, 1), (_ROW, 1)),
        real={"intermediate_size": 12_288},
        layers=2,
        exceeds=_ROW.name,
    ),
    "wide-heads": Case(
        _MANY,
        ((_ALONE, 1), (_ROW, 1)),
        real={"num_attention_heads": 96, "intermediate_size": 1024},
        layers=1,
        exceeds=_ROW.name,
    ),
}


class WatchedSteps(StepBenchmark):
    """Steps that record which tensors of the forward exceed a number of elements."""

    limit = 2**31

    def _step(self, runner: Runner) -> None:
        with LargestResults(self.limit) as largest:
            super()._step(runner)
        runner.record["most_elements"] = largest.most
        runner.record["exceeding"] = {name: list(shape) for name, shape in largest.shapes.items()}


def run_case(name: str, size: str, device: str, seed: int) -> list[dict[str, Any]]:
    """The records of one case."""
    case, architecture = CASES[name], CASES[name].architecture()
    completions = case.lengths[size]
    lengths = GivenLengths(
        prompts=(100, 256) if size == "real" else (4, 10), longest=max(completions), completions=completions
    )
    model = make_architecture(architecture, size, device, case.layers)
    options = {"vllm_importance_sampling_mode": MODE}
    kind = WatchedSteps if case.exceeds else StepBenchmark
    benchmark = kind(model, architecture, lengths, len(completions), device, size, seed, options)
    if isinstance(benchmark, WatchedSteps):
        benchmark.limit = INT32[size]
    console.print(f"[bold]{name}[/]: {benchmark.rollout.tokens} tokens in {benchmark.rollout.width} columns")
    records = benchmark.compare([Runner(contender, repeats) for contender, repeats in case.runners])
    for record in records:
        record |= {"case": name, **tokens_and_padding(benchmark.rollout)}
        judge(record, records[0], case, size, device)
    return records


def judge(record: dict[str, Any], reference: dict[str, Any], case: Case, size: str, device: str) -> None:
    """Add time and memory relative to the reference, and whether results are right and tensors as large as meant."""
    if "ms" not in record:
        return
    is_close = record.get("norm_difference", 0.0) <= NORM_RTOL[device]
    record["right"] = is_close and record.get("loss_difference", 0.0) <= LOSS_ATOL[device]
    if case.exceeds is not None:
        is_large = record["most_elements"] > INT32[size]
        record["right"] = record["right"] and is_large == (record["name"] == case.exceeds)
    if "ms" in reference and record is not reference:
        record["time_ratio"] = record["ms"] / reference["ms"]
        record["memory_ratio"] = record["peak_gib"] / reference["peak_gib"] if device == "cuda" else None


def print_records(records: list[dict[str, Any]]) -> None:
    """One row per contender."""
    table = Table(title="Long sequences")
    columns = ("case", "trainer", "right", "ms", "time", "peak GiB", "loss", "norm", "distance", "most elements")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)

    def number(record: dict[str, Any], key: str, spec: str) -> str:
        return format(record[key], spec) if record.get(key) is not None else ""

    for record in records:
        if "failed" in record:
            table.add_row(record["case"], record["name"], "[red]failed")
            continue
        table.add_row(
            record["case"],
            record["name"],
            "[green]yes" if record["right"] else "[red]no",
            number(record, "ms", ".0f"),
            number(record, "time_ratio", ".3f"),
            number(record, "peak_gib", ".2f"),
            number(record, "loss_difference", ".1e"),
            number(record, "norm_difference", ".1e"),
            number(record, "distance", ".1e"),
            number(record, "most_elements", ","),
        )
    console.print(table)
    for record in records:
        if "failed" in record:
            print(f"{record['case']}, {record['name']}: {record['failed']}")
        if record.get("exceeding"):
            print(f"{record['case']}, {record['name']}: {record['exceeding']}")


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CASES)}; repeatable; all by default")] = None,
    size: Annotated[str, typer.Option(help="real or tiny")] = "real",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="of tokens and noise")] = 6,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, else the last line")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare cases; exits 1 when one fails or is wrong. Stock may run out of memory."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore", FutureWarning)
    record: dict[str, Any] = {**environment(device, commit), "seed": seed, "sampling_mode": MODE, "results": []}
    for name in case or list(CASES):
        record["results"] += run_case(name, size, device, seed)
        clear_memory()
        if json_path is not None:
            write_record(json_path, record)
    print_records(record["results"])
    if json_path is None:
        print(json.dumps(record))
    if not all(entry.get("right", entry["name"] == "stock") for entry in record["results"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
