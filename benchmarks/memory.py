"""
Peak memory against batch size, and the largest batch that fits: TRL 0.27.2's dense loss and its Liger loss (with
Liger's layers, which the same option brings), the TRL of this environment, and ours. A batch is one micro-batch:
forward, backward, clipping and AdamW, with gradient checkpointing and the other defaults of TRL. Lengths are those of
`step.py`; every batch holds the longest completion, so that stock pads all batches to the same width. Each contender
has a process of its own, which may take `gib`. Under FSDP2 it has two, each with the same batch on a GPU of its own.

    python benchmarks/memory.py --old /tmp/trl-0.27.2 --json benchmarks/results/memory-h200.json
    PYTHONPATH=. python benchmarks/memory.py --case 1.7b-fsdp2 --case 8b-fsdp2-lora --json memory-fsdp2.json
    python benchmarks/memory.py --case tiny --device cpu --old ''

`--old` is a folder with TRL 0.27.2 and the libraries of its time (`pip install --target`), put before all others.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _measure import GIB, environment
from _rollout import Lengths, Rollout
from _step_cases import ALL_LINEAR
from _trainers import SHAPES, SharedModel, clear_memory, make_model
from records import write_record
from rich.console import Console
from rich.table import Table


GROUP = 8
MOST = 512  # sequences; larger batches are not tried
SEED = 19
# At every batch that both run: at most this share of the peak of each
PEAK_TARGETS = {"dense, TRL 0.27.2": 0.60, "stock": 0.90}
LARGEST_TARGET = 1.8  # times the dense loss's

app = typer.Typer(add_completion=False)
console = Console(width=150)


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, the memory that a process may take, and whether there are two."""

    model: str
    dtype: str
    lora: bool
    gib: float
    fsdp2: bool = False


@dataclass(frozen=True)
class Contender:
    """A loss; `old` ones run on TRL 0.27.2."""

    name: str
    old: bool = False
    fused: bool = False
    liger: bool = False


CASES = {
    "0.6b-float32": Case("0.6b", "float32", False, 40),
    "0.6b-bfloat16": Case("0.6b", "bfloat16", False, 40),
    "0.6b-lora": Case("0.6b", "bfloat16", True, 40),
    "1.7b-lora": Case("1.7b", "bfloat16", True, 40),
    "4b-lora": Case("4b", "bfloat16", True, 40),
    "8b-lora": Case("8b", "bfloat16", True, 40),
    # Two at a time fit on GPUs of 80 GB
    "1.7b-fsdp2": Case("1.7b", "float32", False, 36, True),
    "4b-fsdp2-lora": Case("4b", "bfloat16", True, 36, True),
    "8b-fsdp2-lora": Case("8b", "bfloat16", True, 36, True),
    "tiny": Case("tiny", "float32", True, 1),
    "tiny-fsdp2": Case("tiny", "float32", True, 1, True),
}
CONTENDERS = {
    "dense": Contender("dense, TRL 0.27.2", old=True),
    "liger": Contender("Liger loss, TRL 0.27.2", old=True, liger=True),
    "stock": Contender("stock"),
    "ours": Contender("ours", fused=True),
}


class Memory:
    """One trainer, and what a step on a batch of a given size takes at most."""

    def __init__(self, case: Case, contender: Contender, device: str):
        self.device = device
        if device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(case.gib * GIB / total)
        model = make_model(case.model, device, getattr(torch, case.dtype), ALL_LINEAR if case.lora else None)
        lengths = Lengths(prompts=(4, 10), median=20, longest=64) if case.model == "tiny" else Lengths()
        self.rollout = longest_first(Rollout.make(lengths, MOST // GROUP, GROUP, SHAPES[case.model][-1], SEED))
        self.shared = SharedModel(model, GROUP, lambda completions, **_: [0.0] * len(completions), GROUP)
        self.optimizer = torch.optim.AdamW(self.shared.trained(), lr=0.0, weight_decay=0.0)
        options: dict[str, Any] = {"bf16": device == "cuda", "max_completion_length": lengths.longest}
        if contender.liger:
            options["use_liger_kernel"] = True
        if case.fsdp2:
            options |= {"optimizer": self.optimizer, **_fsdp2(contender, device)}
        self.trainer = self.shared.build(contender.fused, GROUP, **options)
        if contender.fused:
            from _instruments import hide_instruments

            hide_instruments()
        self.trainer._prepare_inputs = lambda batch: batch  # completions are there
        self.peak(1)  # the optimizer's states

    def peak(self, rows: int) -> float | None:
        """
        Most GiB that a step on `rows` sequences allocates, weights included, or `None` where it does not fit. Of two
        processes the first that has no room says so and ends: torchrun ends the other, which waits for its shards.
        """
        rollout = Rollout(self.rollout.prompts[:rows], self.rollout.completions[:rows])
        batch: dict[str, Any] = rollout.padded(self.device)
        batch["advantages"] = torch.randn(rows, generator=torch.Generator().manual_seed(SEED)).to(self.device)
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        fits = True
        try:
            self.trainer.training_step(self.trainer.model_wrapped, batch, None)
            torch.nn.utils.clip_grad_norm_(self.shared.trained(), 1.0)
            self.optimizer.step()
        except torch.OutOfMemoryError:
            fits = False
            if dist.is_initialized():
                _tell({"out_of_memory": rows})
                os._exit(1)
        self.shared.drop_gradients()
        peak = torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else 0.0
        clear_memory()
        return peak if fits else None


def _fsdp2(contender: Contender, device: str) -> dict[str, Any]:
    if device == "cpu":
        from tests.distributed.engines import launcher_options

        return {"use_cpu": False, **launcher_options("fsdp2")}
    if contender.old:  # transformers 4 leaves the version to Accelerate's variable
        os.environ["FSDP_VERSION"] = "2"
    return {"fsdp": "full_shard auto_wrap" if contender.old else True, "fsdp_config": {"version": 2}}


def longest_first(rollout: Rollout) -> Rollout:
    """The same groups, first the one with the longest completion, and in it this completion."""
    lengths = [len(completion) for completion in rollout.completions]
    longest = lengths.index(max(lengths))
    first = longest // GROUP * GROUP
    rows = [longest, *(row for row in range(first, first + GROUP) if row != longest)]
    rows += [row for row in range(len(lengths)) if row // GROUP != longest // GROUP]
    return Rollout([rollout.prompts[row] for row in rows], [rollout.completions[row] for row in rows])


def peaks_and_largest(peak: Callable[[int], float | None], most: int) -> tuple[dict[int, float], int]:
    """
    Peaks of batches of 1, 2, 4, ... sequences as far as they fit, and the largest batch that fits, to 5% or one
    sequence.
    """
    peaks: dict[int, float] = {}
    rows, fails = 1, most + 1
    while rows <= most:
        found = peak(rows)
        if found is None:
            fails = rows
            break
        peaks[rows] = found
        rows *= 2
    fits = max(peaks, default=0)
    while fails <= most and fails - fits > max(1, fits // 20):
        middle = (fits + fails) // 2
        if peak(middle) is None:
            fails = middle
        else:
            fits = middle
    return peaks, fits


def growing_peaks(peak: Callable[[int], float | None], most: int, gib: float) -> Iterator[tuple[int, float]]:
    """
    Sequences and peaks of larger and larger batches, up to the first that does not fit or to 5% before the one that
    would fill `gib`: sharded layers cannot be used again after an exception, so that no smaller one can follow.
    """
    rows, before = 1, (0, 0.0)
    while (found := peak(rows)) is not None:
        yield rows, found
        growth = (found - before[1]) / (rows - before[0])
        left = int((gib - found) / growth) if growth > 0 and before[0] else most
        before = rows, found
        step = min(rows, left // 2, most - rows)
        if step < max(1, rows // 20):
            break
        rows += step


def judged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The results of a record, ours with its peaks and its largest batch relative to those of the others in the same case,
    and whether every target is met: that of the peaks at each batch that both run.
    """
    return [_judged(entry, results) if entry["name"] == "ours" else entry for entry in results]


def _judged(ours: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    if not ours.get("peaks", {}).get("1"):  # a CPU has no figures
        return ours
    others = {r["name"]: r for r in results if r["case"] == ours["case"] and r["name"] != "ours" and "peaks" in r}
    peaks = {
        name: {
            rows: round(ours["peaks"][rows] / peak, 3) for rows, peak in other["peaks"].items() if rows in ours["peaks"]
        }
        for name, other in others.items()
    }
    largest = {name: round(ours["largest"] / other["largest"], 2) for name, other in others.items() if other["largest"]}
    is_met = all(ratio <= target for name, target in PEAK_TARGETS.items() for ratio in peaks.get(name, {}).values())
    is_met = is_met and largest.get("dense, TRL 0.27.2", LARGEST_TARGET) >= LARGEST_TARGET
    return {**ours, "peak_ratio": peaks, "largest_ratio": largest, "met": is_met}


def run_contender(name: str, contender: str, old: str, device: str) -> dict[str, Any]:
    """The record of one contender, from a process of its own."""
    about = {"case": name, "name": CONTENDERS[contender].name, **asdict(CASES[name])}
    variables = {**os.environ}
    if CONTENDERS[contender].old and old:
        variables["PYTHONPATH"] = os.pathsep.join([old, variables.get("PYTHONPATH", "")])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if CASES[name].fsdp2 else []
    command = [sys.executable, *launch, __file__, "--case", name, "--contender", contender, "--device", device]
    start = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = {key: value for line in lines for key, value in json.loads(line).items()}
    if not found or (done.returncode and "out_of_memory" not in found):
        # Behind the error of a process torchrun reports one of its own
        errors = [line for line in done.stderr.splitlines() if re.search(r"\b(?!ChildFailed)\w+Error: ", line)]
        return {**about, "failed": (errors or [done.stderr.strip()])[-1][-400:]}
    record = {**about, **found, "seconds": round(time.perf_counter() - start, 1)}
    print(json.dumps(record), flush=True)
    return record


def measure(name: str, contender: str, device: str) -> None:
    """Print the record of one contender, in this process."""
    import transformers
    import trl

    most = MOST if device == "cuda" else 4
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    if CASES[name].fsdp2:
        measure_shards(CASES[name], CONTENDERS[contender], device, {"most": most, "versions": versions})
        return
    memory = Memory(CASES[name], CONTENDERS[contender], device)
    peaks, largest = peaks_and_largest(memory.peak, most)
    _tell(_result(peaks, largest) | {"most": most, "versions": versions})


def measure_shards(case: Case, contender: Contender, device: str, about: dict[str, Any]) -> None:
    """Print the record of one contender after each batch, on one of two processes."""
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    _tell(_result({}, 0) | about)
    peaks: dict[int, float] = {}
    for rows, found in growing_peaks(Memory(case, contender, device).peak, about["most"], case.gib):
        peaks[rows] = found
        _tell(_result(peaks, rows))
    dist.destroy_process_group()


def _tell(record: dict[str, Any]) -> None:
    os.write(1, (json.dumps(record) + "\n").encode())  # at once: two processes write


def _result(peaks: dict[int, float], largest: int) -> dict[str, Any]:
    return {"peaks": {str(rows): round(peak, 3) for rows, peak in peaks.items()}, "largest": largest}


def print_records(records: list[dict[str, Any]]) -> None:
    """One row for a contender."""
    table = Table(title="Peak memory of a step, GiB, and the largest batch that fits")
    sizes = [str(2**power) for power in range(8)]
    for column in ("case", "GiB", "name", *sizes, "largest", "met"):
        table.add_column(column)
    for record in records:
        peaks = record.get("peaks", {})
        cells = [f"{peaks[size]:.1f}" if size in peaks else "" for size in sizes]
        met = str(record.get("met", ""))
        table.add_row(
            record["case"], f"{record['gib']:g}", record["name"], *cells, str(record.get("largest", "failed")), met
        )
    console.print(table)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CASES)}; repeatable; those on one GPU")] = None,
    old: Annotated[str, typer.Option(help="folder with TRL 0.27.2; empty where this environment is it")] = "",
    only: Annotated[list[str] | None, typer.Option(help=f"contenders: {', '.join(CONTENDERS)}; repeatable")] = None,
    jobs: Annotated[int, typer.Option(help="processes at a time; the device has room for all", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
    contender: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure; exits 1 when a contender fails or a target is missed."""
    cases = case or [name for name in CASES if "tiny" not in name and not CASES[name].fsdp2]
    if unknown := set(cases) - set(CASES):
        raise typer.BadParameter(f"no case {sorted(unknown)}: one of {', '.join(CASES)}")
    if contender is not None:
        measure(cases[0], contender, device)
        return
    record: dict[str, Any] = {**environment(device, commit), "lengths": asdict(Lengths()), "results": []}
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_contender, name, one, old, device) for name in cases for one in (only or CONTENDERS)]
        for future in futures:
            record["results"] = judged([*record["results"], future.result()])
            if json_path is not None:
                write_record(json_path, record)
    print_records(record["results"])
    if not all(entry.get("met", True) and "failed" not in entry for entry in record["results"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
