"""
Time and memory of the loss, forward and backward: this package, other implementations and the bare matmuls, in one
process on the same tensors. Results are compared with float64 first. One of ours that is wrong is not timed.

    python benchmarks/loss.py --profile --json benchmarks/results/loss-h200.json
    python benchmarks/loss.py --case liger --shape 16384x1024 --json benchmarks/results/liger-h200.json
    python benchmarks/loss.py --case on-policy --curve --shape 16384x1024 --json benchmarks/results/curve-h200.json
    python benchmarks/loss.py --device cpu
"""

import gc
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from _measure import environment, interleaved, poison
from _peers import Step, bare_gemms, dense, library, liger, ours, trl_fused_head
from _work import Reference, Work, as_case, make
from records import write_record
from rich.console import Console
from rich.table import Table

from trl_fused_grpo.ops.linear_logps import Backward


SHAPES = {"cuda": ["16384x1024", "32768x1024", "16384x4096", "4096x1024"], "cpu": ["2048x512"]}
VOCAB = {"cuda": 151_936, "cpu": 32_000}
OURS = ("ours", "library")
# The most time and peak memory, relative to TRL's fused head, that each case is meant to take
TARGETS = {
    "on-policy": (0.74, 1.0),
    "small-memory": (0.82, 0.75),
    "off-policy": (0.78, None),
    "frozen": (0.66, 1.0),
    "half-zero-grad": (0.50, None),
    "no-grad": (0.95, None),
    "fp32-master": (0.76, 1.15),
    "recompute": (None, None),
}
CPU_TARGET = (0.85, None)
# The least work of each case in matmuls over all rows: logits, gradient of the hidden states, gradient of the weight
MATMULS = {"frozen": (1, 1, 0), "half-zero-grad": (1, 0.5, 0.5), "no-grad": (1, 0, 0), "recompute": (2, 1, 1)}
SMALL_LOGITS_MIB = 297  # 1024 rows of 151,936 logits: as much as the copy of the gradient at the end takes
PROFILED = 9  # kernels that a profile names
CURVE_MIB = (38, 75, 149, 223, 297, 594, 891, 1188, 2374)  # 128, 256, 512, 768, 1024, 2048 ... rows of 151,936 logits

app = typer.Typer(add_completion=False)
console = Console(width=150)


def steps_of(case: str, work: Work) -> dict[str, Step]:
    """Every installed implementation of a case, by name."""
    steps: dict[str, Step | None]
    if case == "liger":
        steps = {"liger": liger(work, False), "liger-compiled": liger(work, True), "trl": trl_fused_head(work)}
        steps["library"], steps["ours"] = library(work), ours(work)
    else:
        logits_mib = SMALL_LOGITS_MIB if case == "small-memory" else None
        mine = ours(work, "recompute" if case == "recompute" else "auto", logits_mib)
        steps = {"trl": trl_fused_head(work), "ours": mine, "dense": dense(work) if case == "on-policy" else None}
    return {name: step for name, step in steps.items() if step is not None}


def check(steps: dict[str, Step], work: Work, reference: Reference) -> dict[str, dict[str, float]]:
    """Run each once, with NaN in all free memory, and return the errors against float64."""
    errors = {}
    for name, step in steps.items():
        drop_gradients(work)
        poison(work.hidden.device.type)
        logps = step()
        if logps is not None:
            errors[name] = reference.errors(work, logps, work.hidden.grad, work.weight.grad)
        elif work.hidden.grad is not None:
            # Liger returns the loss alone: only its gradients can be compared
            errors[name] = reference.errors(work, reference.logps, work.hidden.grad, work.weight.grad)
            del errors[name]["logps"]
        del logps
    drop_gradients(work)
    return errors


def is_right(name: str, errors: dict[str, dict[str, float]]) -> bool:
    """Whether the errors of ours are at most 1.1 times those of TRL, plus float32 rounding."""
    peers = [errors["trl"]] if "trl" in errors else [errors[peer] for peer in errors if peer not in OURS]
    bounds = {key: 1.1 * min((peer.get(key, 0.01) for peer in peers), default=0.01) + 1e-6 for key in errors[name]}
    return all(error <= bounds[key] for key, error in errors[name].items())


def drop_gradients(work: Work) -> None:
    work.hidden.grad = work.weight.grad = None


def run_case(case: str, base: Work, reference: Reference, repeats: int) -> list[dict]:
    """Check and time one case; one record per implementation."""
    device = base.hidden.device.type
    work = as_case(case, base, reference)
    steps = steps_of(case, work)
    repeats = min(repeats, 3) if case == "liger" else repeats  # Liger's takes half a second
    errors = check(steps, work, reference)
    right = {name: name not in OURS or is_right(name, errors) for name in steps}
    measured = interleaved(
        {name: steps[name] for name in steps if right[name]}, lambda: drop_gradients(work), device, repeats
    )
    rows, width, vocab = work.shape
    records = []
    for name in steps:
        record = {"case": case, "rows": rows, "width": width, "vocab": vocab, "name": name, "errors": errors[name]}
        records.append({**record, "right": right[name], **measured.get(name, {})})
    return records


def run_limit(base: Work, repeats: int) -> dict:
    """Time the bare matmuls."""
    steps = bare_gemms(base)
    measured = interleaved(steps, lambda: None, base.hidden.device.type, repeats)
    rows, width, vocab = base.shape
    return {"rows": rows, "width": width, "vocab": vocab, **{name: measured[name]["ms"] for name in steps}}


def run_curve(base: Work, reference: Reference, repeats: int) -> list[dict]:
    """Time and memory by the size of the chunk of logits, in both backward modes, and of TRL."""
    work = as_case("on-policy", base, reference)
    points: list[tuple[str, int | None]] = []
    steps: dict[str, Step] = {}
    modes: tuple[Backward, ...] = ("forecast", "recompute")
    for backward in modes:
        for mib in CURVE_MIB:
            points.append((backward, mib))
            steps[f"{backward} {mib}"] = ours(work, backward, mib)
    peer = trl_fused_head(work)
    if peer is not None:
        points.append(("trl", None))
        steps["trl None"] = peer
    measured = interleaved(steps, lambda: drop_gradients(work), base.hidden.device.type, repeats)
    rows, width, vocab = work.shape
    shared = {"rows": rows, "width": width, "vocab": vocab}
    return [
        {**shared, "backward": backward, "logits_mib": mib, **measured[f"{backward} {mib}"]} for backward, mib in points
    ]


def run_profile(case: str, base: Work, reference: Reference, steps: int = 3) -> list[dict]:
    """Milliseconds that each kernel of ours takes in one step of a case, the longest first."""
    work = as_case(case, base, reference)
    step = steps_of(case, work)["ours"]

    def run() -> None:
        for _ in range(steps):
            drop_gradients(work)
            step()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    drop_gradients(work)
    kernels = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    rows, width, _ = work.shape
    shared = {"case": case, "rows": rows, "width": width}
    found = [(e.self_device_time_total / 1e3 / steps, e.count / steps, e.key) for e in kernels]
    found.sort(reverse=True)
    rest = found[PROFILED:]
    found = [*found[:PROFILED], (sum(k[0] for k in rest), sum(k[1] for k in rest), "the rest")]
    return [{**shared, "kernel": name[:100], "calls": calls, "ms": ms} for ms, calls, name in found]


def summarize(records: list[dict], limit: dict, device: str) -> None:
    """Add time and memory relative to the peer and to the bare matmuls, and whether the target is met."""
    peers = {record["case"]: record for record in records if record["name"] == "trl"}
    peers |= {record["case"]: record for record in records if record["name"] == "liger"}
    for record in records:
        peer = peers.get(record["case"])
        if record["name"] not in OURS or "ms" not in record or peer is None:
            continue
        shares = MATMULS.get(record["case"], (1, 1, 1))
        bare = sum(
            share * limit[name] for share, name in zip(shares, ("logits", "grad-hidden", "grad-weight"), strict=True)
        )
        record["time_ratio"] = record["ms"] / peer["ms"]
        record["bare_ratio"] = record["ms"] / bare
        record["memory_ratio"] = record["peak_gib"] / peer["peak_gib"] if device == "cuda" else None
        target = CPU_TARGET if device == "cpu" else TARGETS.get(record["case"], (0.1, 1.0))
        record["target"] = target
        record["met"] = all(
            bound is None or ratio is None or round(ratio, 3) <= bound
            for bound, ratio in zip(target, (record["time_ratio"], record["memory_ratio"]), strict=True)
        )


def print_records(records: list[dict]) -> None:
    """One row per implementation and case."""
    rows, width, vocab = (records[0][key] for key in ("rows", "width", "vocab"))
    table = Table(title=f"N = {rows}, H = {width}, V = {vocab}")
    for column in ("case", "name", "ms", "p20 to p80", "peak GiB", "time", "memory", "x bare", "target", "errors"):
        table.add_column(column, justify="left" if column in ("case", "name", "errors") else "right", no_wrap=True)

    def number(record: dict, key: str, digits: int) -> str:
        return f"{record[key]:.{digits}f}" if record.get(key) is not None else ""

    for record in records:
        bounds = " ".join("-" if bound is None else str(bound) for bound in record.get("target", ()))
        color = "" if "met" not in record else "[green]" if record["met"] else "[red]"
        table.add_row(
            record["case"],
            record["name"],
            number(record, "ms", 2) if record["right"] else "[red]wrong",
            f"{record['ms_p20']:.2f} to {record['ms_p80']:.2f}" if "ms" in record else "",
            number(record, "peak_gib", 3),
            color + number(record, "time_ratio", 3),
            color + number(record, "memory_ratio", 3),
            number(record, "bare_ratio", 2),
            bounds,
            " ".join(f"{error:.1e}" for error in record["errors"].values()),
        )
    console.print(table)


def print_curve(points: list[dict]) -> None:
    """One row per backward mode and size of the chunk of logits."""
    table = Table(title="on-policy, over the size of the chunk of logits")
    for column in ("backward", "MiB of logits", "ms", "peak GiB"):
        table.add_column(column, justify="left" if column == "backward" else "right")
    for point in points:
        peak = "" if point["peak_gib"] is None else f"{point['peak_gib']:.3f}"
        table.add_row(point["backward"], str(point["logits_mib"] or ""), f"{point['ms']:.2f}", peak)
    console.print(table)


def print_profile(kernels: list[dict]) -> None:
    """One row per kernel, the rest together."""
    table = Table(title=f"ours, {kernels[0]['case']}, N = {kernels[0]['rows']}, H = {kernels[0]['width']}")
    for column in ("kernel", "calls", "ms"):
        table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
    for kernel in kernels:
        table.add_row(kernel["kernel"], f"{kernel['calls']:.0f}", f"{kernel['ms']:.2f}")
    console.print(table)


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    shape: Annotated[list[str] | None, typer.Option(help="NxH; repeatable")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TARGETS)} or liger; repeatable")] = None,
    vocab: Annotated[int | None, typer.Option(help="size of the vocabulary")] = None,
    repeats: Annotated[int, typer.Option(help="timed rounds", min=1)] = 10,
    curve: Annotated[bool, typer.Option(help="time against memory over the size of the chunk of logits")] = False,
    profile: Annotated[bool, typer.Option(help="also the kernels of each case")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, else the last line")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare the loss with its peers; exits 1 when a result is wrong."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    record = {
        **environment(device, commit),
        "dtype": str(dtype),
        "results": [],
        "limits": [],
        "curve": [],
        "profiles": [],
    }
    for name in shape or SHAPES[device]:
        rows, width = (int(number) for number in name.split("x"))
        base, reference = make(rows, width, vocab or VOCAB[device], device, dtype)
        limit = run_limit(base, repeats)
        cases = case or (["on-policy"] if device == "cpu" else list(TARGETS))
        records = [entry for one in cases for entry in run_case(one, base, reference, repeats)]
        summarize(records, limit, device)
        print_records(records)
        record["results"] += records
        record["limits"].append(limit)
        if profile:
            for one in cases:
                kernels = run_profile(one, base, reference)
                record["profiles"] += kernels
                print_profile(kernels)
        if curve:
            points = run_curve(base, reference, repeats)
            record["curve"] += points
            print_curve(points)
        del base, reference
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if json_path is not None:
            write_record(json_path, record)
    if json_path is None:
        print(json.dumps(record))
    if not all(entry["right"] for entry in record["results"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
