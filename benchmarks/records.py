"""
Shortens the records that benchmarks write to what is worth committing, one line a case; figures stay as they are.

    python benchmarks/records.py benchmarks/results/parity-float32-h200.json

The scripts here write shortened records by themselves. `trl-fused-grpo parity --json` writes everything that it found,
so its file goes through this script before it is committed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


Record = dict[str, Any]


def write_record(path: Path, record: Record) -> None:
    """Write a record to a file, shortened."""
    path.write_text(as_text(shortened(record)))


def as_text(record: Record) -> str:
    """JSON with each value of the record on a line of its own, and each entry of a list too."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in record.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(" " + json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value)


def shortened(record: Record) -> Record:
    """The record without what nobody quotes; one that is short already comes back as it is."""
    return {
        key: SHORTENED[key](value) if key in SHORTENED else value
        for key, value in record.items()
        if key not in LEFT_OUT
    }


# The runs of the vLLM benchmark that sample for themselves: they differ as soon as one token does
LEFT_OUT = ("free",)
NAME_LENGTH = 60  # of a kernel; those of templates go on for long


def _keep(entry: Record, names: tuple[str, ...]) -> Record:
    return {name: entry[name] for name in names if entry.get(name) not in (None, "")}


def _cases(cases: list[Record]) -> list[Record]:
    """Of `trl-fused-grpo parity`: verdicts and worst errors, stock's beside ours in bfloat16."""
    errors = ("loss_error", "gradient_error", "stock_loss_error", "stock_gradient_error")
    return [_keep(case, ("name", "verdict", "reason", *errors, "layout", *_liger_of(case))) for case in cases]


def _liger_of(case: Record) -> tuple[str, ...]:
    """What `--issue-1082` shows of TRL's Liger loss."""
    return ("fused_ratio", "liger_ratio", "liger_error", "liger") if case["name"].startswith("issue-1082-") else ()


def _profiles(kernels: list[Record]) -> list[Record]:
    """Of `loss.py`: a line for a case and shape, with the milliseconds and the name of each kernel."""
    if not kernels or "kernel" not in kernels[0]:
        return kernels
    profiles: dict[tuple, Record] = {}
    for entry in kernels:
        shape = {name: entry[name] for name in ("case", "rows", "width")}
        profile = profiles.setdefault(tuple(shape.values()), {**shape, "kernels": []})
        profile["kernels"].append([entry["ms"], entry["kernel"][:NAME_LENGTH]])
    return list(profiles.values())


def _results(results: list[Record]) -> list[Record]:
    """Of `nan_gradients.py`: a line for a width; those of other scripts are lines already."""
    if not results or "micro_batch" in results[0] or not isinstance(results[0].get("not_finite"), int):
        return results
    widths: dict[int, Record] = {}
    for entry in results:
        line = widths.setdefault(entry["width"], {"width": entry["width"], "not_finite": {}, "norm_difference": {}})
        for key in ("not_finite", "norm_difference"):
            if key in entry:
                line[key][entry["name"]] = entry[key]
    return list(widths.values())


def _shared(steps: list[Record]) -> list[Record]:
    """Of `vllm_gpu.py`: loss, gradient norm and gradient error of each step on the shared batches."""
    compared = ("loss", "grad_norm", "gradient_error", "fused/rows_recomputed")
    kinds = ("float32", "stock", "null", "fused")
    return [
        {"step": step["step"], **{kind: _keep(step[kind], compared) for kind in kinds if kind in step}}
        for step in steps
    ]


SHORTENED: dict[str, Callable[[Any], Any]] = {
    "cases": _cases,
    "profiles": _profiles,
    "results": _results,
    "shared": _shared,
}


def main(paths: Annotated[list[Path], typer.Argument(help="records to shorten in place")]) -> None:
    """Shorten records."""
    for path in paths:
        before = path.stat().st_size
        write_record(path, json.loads(path.read_text()))
        typer.echo(f"{path}: {before} to {path.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
