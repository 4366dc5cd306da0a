"""Draws the records of `memory.py`."""

from typing import Any

import matplotlib.pyplot as plt


CURVES = {"0.6b-float32": "0.6B, float32 weights", "0.6b-bfloat16": "0.6B, bfloat16 weights"}
FSDP2 = {"1.7b-fsdp2": "1.7B, float32 weights", "4b-fsdp2-lora": "4B, LoRA", "8b-fsdp2-lora": "8B, LoRA"}
LORA = {"0.6b-lora": "0.6B", "1.7b-lora": "1.7B", "4b-lora": "4B", "8b-lora": "8B"}
STYLES = {
    "dense, TRL 0.27.2": ("0.75", "s"),
    "Liger loss, TRL 0.27.2": ("0.55", "^"),
    "stock": ("0.25", "D"),
    "ours": ("C0", "o"),
}


def draw_memory(record: dict[str, Any]) -> plt.Figure:
    """Peak memory against batch size, with float32 and with bfloat16 weights, and the largest batch with LoRA."""
    labels = {name: name for name in STYLES} | {"stock": f"TRL {record['versions']['trl']}", "ours": "trl-fused-grpo"}
    found = {(entry["case"], entry["name"]): entry for entry in record["results"]}
    figure, (*curves, bars) = plt.subplots(1, 3, figsize=(13, 3.8))
    for axes, (case, title) in zip(curves, CURVES.items(), strict=True):
        for name, (color, marker) in STYLES.items():
            peaks = found.get((case, name), {}).get("peaks")
            if peaks is None:  # it failed
                continue
            axes.plot(
                [int(rows) for rows in peaks], list(peaks.values()), color=color, marker=marker, label=labels[name]
            )
        axes.axhline(found[case, "ours"]["gib"], color="C3", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="sequences in a batch", ylabel="peak memory, GiB", ylim=(0, 44))
        axes.grid(alpha=0.3)
    curves[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.9))
    draw_largest(bars, found, LORA)
    bars.set(title=f"LoRA: largest batch in {found['8b-lora', 'ours']['gib']:g} GiB", yscale="log")
    return figure


def draw_sharded_memory(record: dict[str, Any]) -> plt.Figure:
    """The largest micro-batch of each of two processes under FSDP2."""
    found = {(entry["case"], entry["name"]): entry for entry in record["results"]}
    figure, axes = plt.subplots(figsize=(6, 3.4))
    draw_largest(axes, found, {case: title for case, title in FSDP2.items() if (case, "ours") in found})
    gib = next(iter(found.values()))["gib"]
    axes.set(title=f"FSDP2 on two GPUs: largest micro-batch in {gib:g} GiB of each")
    axes.legend(fontsize=8)
    return figure


def draw_largest(axes: plt.Axes, found: dict[tuple[str, str], dict[str, Any]], cases: dict[str, str]) -> None:
    """A group of bars for each case: the largest batch of each contender."""
    shown = [name for name in STYLES if any("largest" in found.get((case, name), {}) for case in cases)]
    for place, name in enumerate(shown):
        sizes = [(i, found.get((case, name), {}).get("largest")) for i, case in enumerate(cases)]
        there = [(i, largest) for i, largest in sizes if largest is not None]  # others failed
        places = [i + (place - (len(shown) - 1) / 2) * 0.22 for i, _ in there]
        drawn = axes.bar(places, [largest for _, largest in there], 0.22, color=STYLES[name][0], label=name)
        axes.bar_label(drawn, fontsize=6)
    axes.set_xticks(range(len(cases)), list(cases.values()))
    axes.spines[["top", "right"]].set_visible(False)
