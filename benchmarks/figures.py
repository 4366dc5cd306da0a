"""
Draw the records in `results/`: time and memory of the loss by case, over the size of the chunk of logits, and of
accumulation windows and whole steps, also with generation; what stock and ours learn, and how far their weights drift
apart.

    python benchmarks/figures.py
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from _equivalence import mean_interval
from _memory_figure import draw_memory, draw_sharded_memory
from matplotlib.axes import Axes


HERE = Path(__file__).parent
CASES = ("on-policy", "small-memory", "off-policy", "frozen", "half-zero-grad", "no-grad", "fp32-master", "recompute")
WINDOW_ROWS = {
    "ours": "ours",
    "ours, micro-batches as large as stock's memory allows": "micro-batches",
    "stock with Liger's layers": "stock, Liger's layers",
    "ours with Liger's layers": "ours, Liger's layers",
}
STEP_ARMS = {
    "stock": ("stock TRL", "0.65"),
    "ours": ("trl-fused-grpo", "C0"),
}
STEP_CASES = {
    "1.7b": "76% padding",
    "1.7b-half": "55%",
    "1.7b-quarter": "29%",
    "1.7b-alike": "4%",
}
LEARNING_ARMS = {
    "stock": ("stock TRL", "0.35", "-"),
    "null": ("stock TRL, other attention", "C1", ":"),
    "ours": ("trl-fused-grpo", "C0", "-"),
    "ours, in chunks": ("trl-fused-grpo, small chunks", "C2", "--"),
}
LEARNING_PANELS = {
    "accuracy": "accuracy on held-out sums",
    "reward": "mean reward",
    "entropy": "entropy, nats",
    "kl": "KL from the start, nats",
    "grad_norm": "gradient norm",
    "clipped": "share of clipped ratios",
}
# By case the records of one, two and four GPUs
SCALING = {
    "1.7B, DDP": {1: ("step-padding", "1.7b"), 2: ("step-two-gpus", "1.7b-ddp"), 4: ("step-four-gpus", "1.7b-ddp")},
    "4B, FSDP2": {2: ("step-two-gpus-compiled", "4b-fsdp2"), 4: ("step-four-gpus", "4b-fsdp2")},
}
PHASE_COLORS = {
    "generation": "0.75",
    "synchronisation": "C4",
    "sleep": "C5",
    "scoring": "C1",
    "training": "C0",
    "optimizer": "C2",
    "other": "C3",
}
WINDOWS = {"window-0.6b-h200.json": "0.6B", "window-4b-h200.json": "4B", "window-4b-lora-h200.json": "4B LoRA"}


def load(name: str) -> dict[str, Any]:
    """A record."""
    return json.loads((HERE / "results" / name).read_text())


def source(record: dict[str, Any]) -> str:
    """Where a record's numbers come from, for the foot of a figure."""
    versions = record["versions"]
    return f"{record['device']}, TRL {versions['trl']}, torch {versions['torch']}, commit {record['commit'][:7]}"


def bars(axes: Axes, groups: list[str], series: dict[str, list[float | None]]) -> None:
    """Groups of bars, one of each series; a line at 1."""
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, [value or 0.0 for value in values], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)


def draw_loss(name: str) -> plt.Figure:
    """Time and peak memory of every case relative to TRL's fused head."""
    record = load(name)
    mine = {(e["case"], f"{e['rows']} x {e['width']}"): e for e in record["results"] if e["name"] == "ours"}
    shapes = list(dict.fromkeys(shape for _, shape in mine))
    cases = [case for case in CASES if any(case == known for known, _ in mine)]
    figure, both = plt.subplots(2, 1, figsize=(11, 7), sharex=True)
    for axes, key, title in zip(both, ("time_ratio", "memory_ratio"), ("time", "peak memory"), strict=True):
        bars(axes, cases, {shape: [mine.get((case, shape), {}).get(key) for case in cases] for shape in shapes})
        axes.set_ylabel(f"{title}, TRL's fused head = 1")
        axes.set_ylim(0, 1.25)
    both[0].legend(title="rows x hidden size", ncols=len(shapes), loc="upper left")
    both[0].set_title("Loss forward and backward, vocabulary 151,936, bfloat16")
    figure.text(0.99, 0.01, source(record), ha="right", fontsize=8)
    return figure


def draw_curve(name: str) -> plt.Figure:
    """Time against peak memory, a point for each size of the chunk of logits."""
    record = load(name)
    figure, axes = plt.subplots(figsize=(8, 5))
    for backward in ("forecast", "recompute", "trl"):
        points = [point for point in record["curve"] if point["backward"] == backward]
        label = "TRL's fused head" if backward == "trl" else f'fused_backward="{backward}"'
        axes.plot(
            [p["peak_gib"] for p in points], [p["ms"] for p in points], "s" if backward == "trl" else "o-", label=label
        )
        shift = (5, -11 if backward == "forecast" else 5)
        for point in points:
            if point["logits_mib"]:
                place = point["peak_gib"], point["ms"]
                axes.annotate(f"{point['logits_mib']}", place, xytext=shift, textcoords="offset points", fontsize=8)
    axes.set(xlabel="peak memory, GiB", ylabel="forward and backward, ms", xlim=(0, 2), ylim=(0, None))
    first = record["curve"][0]
    axes.set_title(f"On-policy, {first['rows']} rows, hidden size {first['width']}; beside points: MiB of logits")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.text(0.99, 0.01, source(record), ha="right", fontsize=8)
    return figure


def draw_windows(names: dict[str, str]) -> plt.Figure:
    """Time and peak memory of accumulation windows relative to stock's."""
    records = {label: load(name) for name, label in names.items()}
    figure, both = plt.subplots(1, 2, figsize=(11, 4.5))
    for axes, key, title in zip(both, ("time_ratio", "memory_ratio"), ("time", "peak memory"), strict=True):
        series = {
            label: [_find(record, start, key) for record in records.values()] for label, start in WINDOW_ROWS.items()
        }
        bars(axes, list(records), series)
        axes.set(ylabel=f"{title}, stock = 1", ylim=(0, 1.45))
    both[0].legend(loc="upper left")
    figure.suptitle("One accumulation window without generation, micro-batches of 4")
    figure.text(0.99, 0.01, source(next(iter(records.values()))), ha="right", fontsize=8)
    return figure


def draw_step(name: str) -> plt.Figure:
    """Time and peak memory of whole optimizer steps, stock and ours, for the README."""
    record = load(name)
    figure, both = plt.subplots(1, 2, figsize=(10, 2.9))
    panels = (("time, s", "ms", 1e-3), ("peak memory, GiB", "peak_gib", 1.0))
    for axes, (title, key, unit) in zip(both, panels, strict=True):
        for shift, (arm, (label, color)) in zip((-0.2, 0.2), STEP_ARMS.items(), strict=True):
            found = {entry["case"]: entry[key] * unit for entry in record["results"] if entry["name"] == arm}
            places = [i + shift for i in range(len(STEP_CASES))]
            drawn = axes.bar(places, [found[case] for case in STEP_CASES], 0.38, label=label, color=color)
            axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
        axes.set_xticks(range(len(STEP_CASES)), STEP_CASES.values(), fontsize=7)
        axes.set_title(title, fontsize=11)
        axes.set_yticks([])
        axes.margins(y=0.15)
        axes.spines[["left", "top", "right"]].set_visible(False)
    both[0].legend(loc="upper right", frameon=False, fontsize=9)
    about = f"an optimizer step of Qwen3-1.7B, 32 completions, without generation; {source(record)}"
    figure.text(0.99, 0.01, about, ha="right", fontsize=7)
    return figure


def draw_scaling() -> plt.Figure:
    """Milliseconds of a step against the number of GPUs, the same work on each, stock and ours."""
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2))
    for axes, (arm, (label, color)) in zip(both, STEP_ARMS.items(), strict=True):
        for style, (name, places) in zip(("o-", "s--"), SCALING.items(), strict=True):
            milliseconds = [_newest_ms(f"{record}-h200.json", case, arm) for record, case in places.values()]
            axes.plot([*places], milliseconds, style, color=color, label=name)
            for place, time in zip(places, milliseconds, strict=True):
                axes.annotate(f"{time:,.0f}", (place, time), xytext=(0, 6), textcoords="offset points", ha="center")
        axes.set(title=label, xlabel="GPUs", xticks=(1, 2, 4), ylim=(0, None))
        axes.margins(y=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    both[0].set_ylabel("a step, ms")
    figure.text(0.99, 0.01, "H200 on one machine, TRL 1.16.0, torch 2.11.0", ha="right", fontsize=7)
    return figure


def _newest_ms(name: str, case: str, arm: str) -> float:
    return [entry["ms"] for entry in load(name)["results"] if (entry["case"], entry["name"]) == (case, arm)][-1]


def draw_end_to_end(names: list[str]) -> plt.Figure:
    """Whole steps with vLLM: medians of their phases, stacked, stock and ours side by side on the same completions."""
    records = [load(name) for name in names]
    entries = [entry for record in records for entry in record["results"]]
    by_group = defaultdict(list)
    for entry in entries:
        by_group[entry["case"], entry["mode"], entry["sleep"], entry["rows"]].append(entry)
    groups = sorted(by_group)
    figure, axes = plt.subplots(figsize=(5 + 1.3 * len(groups), 4.2))
    for number, group in enumerate(groups):
        steps = min(len(entry["all_ms"]) for entry in by_group[group])  # that all have
        for entry in by_group[group]:
            place, below = number + (-0.2 if entry["name"] == "stock" else 0.2), 0.0
            for phase, color in PHASE_COLORS.items():
                seconds = statistics.median(entry["phases"][phase][:steps]) / 1e3
                axes.bar(place, seconds, 0.36, bottom=below, color=color, label=phase if entry is entries[0] else None)
                below += seconds
            whole = statistics.median(entry["all_ms"][:steps]) / 1e3
            axes.annotate(f"{entry['name']}\n{whole:.1f}", (place, below), ha="center", va="bottom", fontsize=8)
    labels = [f"{case}, {rows} completions\n{mode}{', sleep' if sleep else ''}" for case, mode, sleep, rows in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.set_ylabel("a step, s")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    commits = {record["commit"] for record in records[1:]} - {records[0]["commit"]}
    about = " and ".join([source(records[0]), *sorted(commits)]) + f", vLLM {records[0]['versions']['vllm']}"
    figure.text(0.99, 0.01, about, ha="right", fontsize=7)
    return figure


def draw_micro_batches(name: str) -> plt.Figure:
    """Loss and gradient norm over the size of a micro-batch, for each loss type."""
    record = load(name)
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6))
    for axes, key, title in zip(both, ("loss", "grad_norm"), ("loss", "gradient norm"), strict=True):
        for loss_type in dict.fromkeys(entry["loss_type"] for entry in record["results"]):
            entries = [entry for entry in record["results"] if entry["loss_type"] == loss_type]
            sizes = [entry["micro_batch"] for entry in entries]
            whole = abs(entries[-1]["stock"][key])
            scale = whole if key == "grad_norm" else 1.0
            [line] = axes.plot(sizes, [entry["stock"][key] / scale for entry in entries], label=loss_type)
            axes.plot(sizes, [entry["ours"][key] / scale for entry in entries], "o", color=line.get_color(), ms=4)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="sequences in a micro-batch", ylabel=title)
        axes.grid(alpha=0.3)
    both[0].set_ylim(-0.2, 0.2)  # LUSPO's, a sum over tokens, is higher
    both[1].set_ylabel("gradient norm, all at once = 1")
    both[1].legend(fontsize=8, title="line: stock, dots: ours", title_fontsize=8)
    figure.text(0.99, 0.01, source(record), ha="right", fontsize=8)
    return figure


def draw_learning(name: str) -> plt.Figure:
    """What each arm learns: the mean over the seeds against the step, and a band from their 10th to 90th percentile."""
    record = load(name)
    figure, grid = plt.subplots(2, 3, figsize=(12, 6.2))
    for axes, key in zip(grid.flat, LEARNING_PANELS, strict=True):
        for arm, (label, color, style) in LEARNING_ARMS.items():
            curves = [entry[key] for entry in record["results"] if entry["arm"] == arm]
            if curves:
                steps = steps_of(key, record, len(curves[0]))
                mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
                draw_band(axes, steps, curves, color)
                axes.plot(steps, mean, style, color=color, label=label)
        axes.set(xlabel="optimizer step", title=LEARNING_PANELS[key])
        axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8)
    seeds = len({entry["seed"] for entry in record["results"]})
    about = f"{seeds} seeds: mean, 10th to 90th percentile; {source(record)}"
    figure.text(0.99, 0.01, about, ha="right", fontsize=7)
    return figure


def draw_differences(name: str, panels: tuple[str, ...]) -> plt.Figure:
    """What each arm learns minus what stock learns from the same start, against the step: mean and 90% interval."""
    record = load(name)
    figure, grid = plt.subplots(1, len(panels), squeeze=False, figsize=(5 * len(panels), 3.1))
    for axes, key in zip(grid.flat, panels, strict=True):
        curves = {(entry["arm"], entry["seed"]): entry[key] for entry in record["results"]}
        seeds = [seed for arm, seed in curves if arm == "stock"]
        for arm, (label, color, style) in [*LEARNING_ARMS.items()][1:]:
            pairs = [
                zip(curves[arm, seed], curves["stock", seed], strict=True) for seed in seeds if (arm, seed) in curves
            ]
            if pairs:
                differences = [[found - stock for found, stock in pair] for pair in pairs]
                points = [mean_interval(values, 0.9) for values in zip(*differences, strict=True)]
                mean, low, high = zip(*points, strict=True)
                steps = steps_of(key, record, len(points))
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
                axes.plot(steps, mean, style, color=color, label=f"{label} minus stock")
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(xlabel="optimizer step", title=f"{LEARNING_PANELS[key]}, paired")
        axes.grid(alpha=0.3)
    grid[0][-1].legend(fontsize=8, loc="lower left")
    figure.text(0.99, 0.01, f"{len(seeds)} seeds: mean, 90% interval; {source(record)}", ha="right", fontsize=7)
    return figure


def steps_of(key: str, record: dict[str, Any], points: int) -> list[float]:
    """The steps at which the points of a curve of `learning.py` stand."""
    every, last = record["evaluated_every" if key == "accuracy" else "steps_of_a_point"], record["setting"]["steps"]
    if key == "accuracy":
        return [min(every * (point + 1), last) for point in range(points)]
    return [(every * point + 1 + min(every * (point + 1), last)) / 2 for point in range(points)]


def draw_band(axes: Axes, steps: list[float], curves: list[list[float]], color: str) -> None:
    """A band from the 10th to the 90th percentile of curves."""
    points = [sorted(values) for values in zip(*curves, strict=True)]
    tenth = len(curves) // 10
    low, high = ([values[place] for values in points] for place in (tenth, -1 - tenth))
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def draw_replay(name: str) -> plt.Figure:
    """How far the weights of each arm drift from stock's on the same tokens, seed by seed and in the mean."""
    record = load(name)
    figure, axes = plt.subplots(figsize=(6, 3.8))
    for arm, (label, color, style) in LEARNING_ARMS.items():
        lines = [line for line in record["comparison"] if line["arm"] == arm]
        if lines:
            drifts = [list(entry["drift"].values()) for entry in record["results"] if entry["arm"] == arm]
            steps = [line["step"] for line in lines]
            draw_band(axes, steps, drifts, color)
            axes.plot(steps, [line["drift"] for line in lines], style, marker="o", ms=4, color=color, label=label)
    axes.set(xlabel="generation batch of a recorded training of stock", ylim=(0, None))
    axes.set_ylabel("distance from stock's weights,\nrelative to stock's from the start")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    seeds = len({entry["seed"] for entry in record["results"]})
    figure.text(0.99, 0.01, f"{seeds} seeds; {source(record)}", ha="right", fontsize=7)
    return figure


def _find(record: dict[str, Any], start: str, key: str) -> float | None:
    """A figure of the first entry whose name begins with `start`."""
    return next((entry[key] for entry in record["results"] if entry["name"].startswith(start)), None)


def main(folder: Annotated[Path, typer.Option(help="where the figures go")] = HERE / "figures") -> None:
    """Draw everything, into `figures/` beside this script unless told otherwise."""
    folder.mkdir(exist_ok=True)
    drawn = {
        "loss": draw_loss("loss-h200.json"),
        "curve": draw_curve("curve-h200.json"),
        "window": draw_windows(WINDOWS),
        "step": draw_step("step-padding-h200.json"),
        "scaling": draw_scaling(),
        "micro-batches": draw_micro_batches("micro-batches-cpu.json"),
        "memory": draw_memory(load("memory-h200.json")),
        "learning": draw_learning("learning-h100.json"),
        "learning-short": draw_differences("learning-h100.json", ("accuracy", "entropy")),
        "replay": draw_replay("replay-h200.json"),
    }
    for path in sorted((HERE / "results").glob("memory-fsdp2-*.json")):
        drawn["memory-fsdp2"] = draw_sharded_memory(json.loads(path.read_text()))
    if names := sorted(path.name for path in (HERE / "results").glob("end-to-end-*.json")):
        drawn["end-to-end"] = draw_end_to_end(names)
    for name, figure in drawn.items():
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(folder / f"{name}.png", dpi=110)
        typer.echo(folder / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
