"""What `step.py` makes of its records: whether they are right and meet their targets, and a table."""

from typing import Any

from _step_cases import Case
from rich.console import Console
from rich.table import Table


# Under autocast each rounds in an order of its own, and a ratio a sequence is the exponential of a sum of such errors
NORM_RTOL = {"cuda": 0.1, "cpu": 1e-5}

console = Console(width=170)


def judge(record: dict[str, Any], stock: dict[str, Any], case: Case, device: str) -> None:
    """Add time and memory relative to stock, and whether norms are right and the target is met."""
    if stock["name"] != "stock" or record is stock or "ms" not in record or "ms" not in stock:
        return
    record["norm_difference"] = abs(record["grad_norm"] - stock["grad_norm"]) / stock["grad_norm"]
    record["right"] = record["norm_difference"] <= NORM_RTOL[device]
    record["time_ratio"] = record["ms"] / stock["ms"]
    peak = "peak_gib" if stock["has_optimizer_states"] else "first_peak_gib"
    record["memory_ratio"] = record[peak] / stock[peak] if device == "cuda" else None
    if case.target is not None:
        fits = record["memory_ratio"] is None or round(record["memory_ratio"], 2) <= case.memory
        record["target"], record["memory_target"] = case.target, case.memory
        record["met"] = record["right"] and fits and round(record["time_ratio"], 3) <= case.target


def print_records(records: list[dict[str, Any]]) -> None:
    """One row per contender."""
    columns = {
        "case": "",
        "name": "",
        "ms": ".0f",
        "time_ratio": ".3f",
        "target": ".3f",
        "peak_gib": ".2f",
        "memory_ratio": ".3f",
        "met": "",
        "tokens_per_s": ".0f",
        "mfu": ".2f",
        "gpu_waits": ".2f",
        "exchanges": ".2f",
        "first_step_ms": ".0f",
        "rows_recomputed": ".3f",
        "norm_difference": ".1e",
    }
    table = Table(title="Whole optimizer steps")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("case", "name") else "right")
    for record in records:
        values = (record.get(column) for column in columns)
        cells = zip(values, columns.values(), strict=True)
        table.add_row(*("" if value is None else format(value, spec) for value, spec in cells))
    console.print(table)
