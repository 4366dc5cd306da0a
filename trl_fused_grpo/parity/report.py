"""Shows the results of a comparison: a table, a JSON file, a plot."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trl_fused_grpo import __version__
from trl_fused_grpo.training.summary import versions

from .judge import LOSS_FLOOR, LOSS_SLACK, PARAMETER_SLACK, SLACK, TOLERANCE, Result
from .trainers import Settings, has_liger_loss


_STYLES = {"equal": "green", "different": "bold red", "failed": "bold red", "skipped": "dim"}
_SMALLEST = 1e-9  # where the plot puts an error of zero


def environment(settings: Settings) -> dict[str, str]:
    """With which the figures were measured: versions by distribution name, `"device"` and `"dtype"`."""
    found, names = versions(), ("trl", "transformers", "liger-kernel", "torch", "peft")
    device = f"cuda ({torch.cuda.get_device_name()})" if settings.device == "cuda" else settings.device
    about = {"device": device, "dtype": str(settings.dtype).removeprefix("torch.")}
    return {"trl-fused-grpo": __version__, **{name: found[name] or "not installed" for name in names}, **about}


def passed(results: Sequence[Result]) -> bool:
    """Return `True` if nothing is out of tolerance and nothing failed."""
    return not any(result.verdict in ("different", "failed") for result in results)


def print_report(
    results: Sequence[Result], settings: Settings, console: Console, layouts: bool = False, measured: str = "gradient"
) -> None:
    """
    Print the table, what went wrong, and a summary line.

    Args:
        results (`Sequence[Result]`): in the order in which to show them.
        settings ([`Settings`]): decides which errors are shown.
        console (`rich.console.Console`): where to print.
        layouts (`bool`): whether to show the layout of the fused trainer's rows.
        measured (`str`): what was compared.
    """
    console.print(_table(results, settings, layouts, measured))
    for result in results:
        if result.verdict in ("different", "failed"):
            console.print(f"[bold red]{result.name}[/]: {escape(result.reason)}")
    console.print(_summary(results))


def _new_table(title: str, *texts: str, numbers: Sequence[str]) -> Table:
    table = Table(*texts, title=title, title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _table(results: Sequence[Result], settings: Settings, layouts: bool, measured: str) -> Table:
    about = environment(settings)
    title = " · ".join(f"{name} {value}" for name, value in about.items() if name not in ("device", "dtype"))
    title = f"{title}\n{about['device']} · {about['dtype']} · {_explanation(settings, measured)}"
    numbers = ["loss", "loss\nerror", f"worst {measured}\nerror", "metrics\ndiffer"]
    numbers += ["gradient norm\nstock Liger"] if has_liger_loss() else []
    numbers += [f"{measured} norm\nfused", "rows\nrecomputed"]
    table = _new_table(title, "case", *(["layout"] if layouts else []), numbers=numbers)
    table.columns[0].no_wrap, table.columns[0].max_width = True, 48
    table.add_column("verdict")
    for result in results:
        table.add_row(*_row(result, layouts), style="dim" if result.verdict == "skipped" else None)
    return table


def print_issue_1082(results: Sequence[Result], settings: Settings, console: Console) -> None:
    """Print what TRL's Liger loss and the fused trainer make of each thing that Liger-Kernel's issue 1082 names."""
    about = environment(settings)
    title = f"TRL {about['trl']}, liger-kernel {about['liger-kernel']}: gradients relative to TRL's own path"
    numbers = [f"{of},\n{name}" for of in ("norm", "distance") for name in ("TRL's Liger loss", "fused")]
    table = _new_table(title, "what the objective depends on", numbers=numbers)
    for result in results:
        liger = _liger_ratio(result) if has_liger_loss() else "none in this TRL"
        norms = liger, _number(result.fused_ratio, ".3f")
        distances = _number(result.liger_error, ".2g"), _number(result.gradient_error, ".1e")
        table.add_row(result.description, *norms, *distances)
    console.print(table)
    console.print(_summary(results))


def _explanation(settings: Settings, measured: str) -> str:
    norms = f"{measured} norms relative to stock's"
    if settings.dtype == torch.bfloat16:
        return (
            f"errors against float64: fused / stock's · {norms}\n"
            f"tolerance: {SLACK} times stock's error over all gradients, {PARAMETER_SLACK} times for one, "
            f"{LOSS_SLACK} times + {LOSS_FLOOR:.1e} for the loss"
        )
    return f"errors relative to stock, tolerance {TOLERANCE:.0e} · {norms}"


def _row(result: Result, layouts: bool) -> list[str]:
    cells = [
        result.name,
        *([result.layout or ""] if layouts else []),
        _number(result.loss, ".4g"),
        _pair(result.loss_error, result.stock_loss_error),
        _pair(result.gradient_error, result.stock_gradient_error),
        "" if result.verdict == "skipped" else str(len(result.metrics_differ)),
    ]
    if has_liger_loss():
        cells.append(_liger_ratio(result))
    cells += [_number(result.fused_ratio, ".3f"), _number(result.recomputed, ".0%")]
    return [*cells, _styled(result.verdict, result.verdict)]


def _liger_ratio(result: Result) -> str:
    return result.liger or _number(result.liger_ratio, ".3f" if (result.liger_ratio or 0) < 10 else ".1f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _pair(fused: float | None, stock: float | None) -> str:
    if fused is None or stock is None:
        return _number(fused, ".1e")
    return f"{fused:.1e} / {stock:.1e}"


def counts_of(results: Sequence[Result]) -> str:
    """Return how many results have which verdict, in rich's markup."""
    counts = Counter(result.verdict for result in results)
    verdicts = [*filter(counts.get, _STYLES), *sorted(counts.keys() - _STYLES.keys())]
    return ", ".join(_styled(verdict, f"{counts[verdict]} {verdict}") for verdict in verdicts)


def _styled(verdict: str, text: str) -> str:
    style = _STYLES.get(verdict, "yellow")
    return f"[{style}]{text}[/]"


def _summary(results: Sequence[Result]) -> str:
    reasons = sorted({r.reason for r in results if r.verdict == "skipped"})
    skipped = f" ({escape('; '.join(reasons))})" if reasons else ""
    return f"{counts_of(results)}{skipped} in {sum(r.seconds for r in results):.0f} s"


def write_json(results: Sequence[Result], settings: Settings, path: Path) -> None:
    """Write versions, settings and every figure. Those that are not finite become the strings `"inf"` and `"nan"`."""
    slack = {"gradients": SLACK, "parameter": PARAMETER_SLACK, "loss": LOSS_SLACK, "loss_floor": LOSS_FLOOR}
    content = {
        "environment": environment(settings),
        "tolerance": {"float32": TOLERANCE, "bfloat16": slack},
        "passed": passed(results),
        "cases": [
            {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(result).items()}
            for result in results
        ],
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_plot(results: Sequence[Result], settings: Settings, path: Path) -> bool:
    """
    Draw the worst gradient error of every case and, where TRL has one, its Liger loss's gradient norm over stock's.
    Return `False`, and write nothing, if no case has an error. The suffix of the path chooses the format.
    """
    from matplotlib.figure import Figure

    shown = [result for result in results if result.gradient_error is not None]
    if not shown:
        return False
    liger = has_liger_loss()
    figure = Figure(figsize=(14 if liger else 9, 2 + 0.2 * len(shown)), layout="constrained")
    panels = figure.subplots(1, 2 if liger else 1, sharey=True, squeeze=False)[0]
    if settings.dtype == torch.bfloat16:
        _draw(panels[0], [r.stock_gradient_error for r in shown], "#999999", "stock", "D")
    else:
        panels[0].axvline(TOLERANCE, color="#d55e00", linestyle="--", label=f"tolerance {TOLERANCE:.0e}")
    _draw(panels[0], [r.gradient_error for r in shown], "#0072b2", "fused")
    reference = "float64" if settings.dtype == torch.bfloat16 else "stock TRL"
    _finish(panels[0], f"worst gradient error, relative to {reference}")
    if liger:
        panels[1].axvline(1.0, color="#999999", linewidth=1)
        _draw(panels[1], [r.liger_ratio or None for r in shown], "#d55e00", "stock Liger")
        _draw(panels[1], [r.fused_ratio or None for r in shown], "#0072b2", "fused")
        _finish(panels[1], "gradient norm over stock TRL's")
    panels[0].set_yticks(range(len(shown)), [result.name for result in shown], fontsize=8)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    about = environment(settings)
    figure.suptitle(f"TRL {about['trl']}, {about['device']}, {about['dtype']}", fontsize=11)
    figure.savefig(path, dpi=150)
    return True


def _draw(axes: Any, values: Sequence[float | None], color: str, label: str, marker: str = "o") -> None:
    points = [(max(v, _SMALLEST), i) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if points:
        axes.scatter(*zip(*points, strict=True), s=18, color=color, label=label, marker=marker)


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel(label)
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
