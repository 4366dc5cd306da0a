"""What `vllm_gpu.py` tells of its trainers: errors against float32, the verdict on ours, and the tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table


KINDS = ("stock", "fused")
# What rounds on the shared batches. The null is stock with another attention: how far rounding alone may lead
BFLOAT16 = ("stock", "null", "fused")
RATIOS = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
LOGGED = ("loss", "grad_norm", *RATIOS, "sampling/sampling_logp_difference/mean", "reward", "fused/rows_recomputed")


def judge(shared: list[dict[str, Any]]) -> dict[str, dict[str, float | bool]]:
    """
    Each trainer in bfloat16 against float32: the worst step for each logged number, the median step for the gradients.

    Args:
        shared (`list[dict[str, Any]]`): a row for a step, with the numbers of each trainer by its name.

    Returns:
        `dict[str, dict[str, float | bool]]`: by number, the error of each trainer, how far fused (`apart`) and the null
        (`null_apart`) are from stock, and whether the error of fused is `within` stock's. The null does not decide.
    """
    verdict: dict[str, dict[str, float | bool]] = {}
    for name in ("loss", "grad_norm", *RATIOS):
        errors = {kind: _worst(shared, name, kind, "float32") for kind in BFLOAT16}
        apart = {"apart": _worst(shared, name, "fused", "stock"), "null_apart": _worst(shared, name, "null", "stock")}
        # Twice: the worst of a few steps is itself a noisy number.
        verdict[name] = errors | apart | {"within": errors["fused"] <= 2 * errors["stock"] + 1e-6}
    medians = {kind: statistics.median(row[kind]["gradient_error"] for row in shared) for kind in BFLOAT16}
    verdict["gradient_error"] = medians | {"within": medians["fused"] <= 1.1 * medians["stock"] + 1e-6}
    return verdict


def _worst(shared: list[dict[str, Any]], name: str, kind: str, other: str) -> float:
    return max(abs(row[kind][name] - row[other][name]) for row in shared)


def print_report(report: dict[str, Any], console: Console) -> None:
    """The free runs, the shared batches, the verdict, and the gradient errors in one line."""
    for table in (_free_runs(report["free"]), _shared_batches(report["shared"]), _errors(report["verdict"])):
        console.print(table)
    error = report["verdict"]["gradient_error"]
    ours, null = (error[kind] / error["stock"] for kind in ("fused", "null"))
    console.print(f"Median gradient error relative to stock's: fused {ours:.3f}, null (eager attention) {null:.3f}")


def _free_runs(free: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title="free runs: stock | fused")
    for heading in ("step", "loss", "grad norm", "ratio min", "mean", "max", "logp difference", "seconds", "peak GiB"):
        table.add_column(heading, justify="right")
    columns = (*LOGGED[:6], "seconds", "peak_above_resting_gib")
    for pair in zip(*(free[kind] for kind in KINDS), strict=True):
        cells = (" | ".join(f"{row.get(name, float('nan')):.4g}" for row in pair) for name in columns)
        table.add_row(str(pair[0]["step"]), *cells)
    return table


def _shared_batches(shared: list[dict[str, Any]]) -> Table:
    table = Table(title="shared batches; the null is stock with eager attention")
    for heading in ("step", "", "loss", "grad norm", "ratio min", "mean", "max", "gradient error", "recomputed"):
        table.add_column(heading, justify="right")
    for row in shared:
        for kind in (*BFLOAT16, "float32"):
            values = row[kind]
            cells = [f"{values[name]:.5g}" for name in ("loss", "grad_norm", *RATIOS)]
            cells.append(f"{values['gradient_error']:.2e}" if kind in BFLOAT16 else "")
            cells.append(f"{values.get('fused/rows_recomputed', float('nan')):.3f}" if kind == "fused" else "")
            table.add_row(str(row["step"]) if kind == "stock" else "", kind, *cells, end_section=kind == "float32")
    return table


def _errors(verdict: dict[str, dict[str, float | bool]]) -> Table:
    table = Table(title="error against float32 (worst step; gradients: median)")
    for heading in ("", *BFLOAT16, "null - stock", "fused - stock", "fused within bf16 noise"):
        table.add_column(heading, justify="right")
    for name, entry in verdict.items():
        numbers = (f"{entry[key]:.3g}" if key in entry else "" for key in (*BFLOAT16, "null_apart", "apart"))
        table.add_row(name, *numbers, "yes" if entry["within"] else "NO")
    return table
