"""Time, memory, logged metrics and environment of a benchmark."""

import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback


GIB = 2**30
LEAD_IN_MS = 60


@contextmanager
def flash_attention_by(implementation: str | None) -> Generator[None, None, None]:
    """While it lasts, torch's FlashAttention is another implementation of it: `"FA3"` or `"FA4"`."""
    if implementation is None:
        yield
        return
    from torch.nn import attention

    attention.activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def timed(step: Callable, reset: Callable, device: str, lead_in: int) -> float:
    """Milliseconds of one call after `lead_in` others of the same, which bring clocks and queue to its steady state."""
    for _ in range(lead_in):
        reset()
        step()
    reset()
    if device == "cpu":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def interleaved(steps: Mapping[str, Callable], reset: Callable, device: str, repeats: int) -> dict[str, dict]:
    """
    Time all steps in turns, and their memory in one more round.

    A GPU at its power limit runs whatever follows a cheap step faster than what follows an expensive one, by several
    percent: on CUDA each timed call comes after some 60 ms of the same step.

    Args:
        steps (`Mapping[str, Callable]`): what to time.
        reset (`Callable`): frees the gradients; called before every step, not timed.
        device (`str`): `"cuda"` or `"cpu"`.
        repeats (`int`): rounds that count; one more comes before them.

    Returns:
        `dict[str, dict]`: per step median, 20th and 80th percentile in ms, and the peak in GiB above the inputs
        (`None` on the CPU).
    """
    times: dict[str, list[float]] = {}
    lead_in = {}
    for name, step in steps.items():
        first = timed(step, reset, device, 1)
        lead_in[name] = min(12, math.ceil(LEAD_IN_MS / first)) if device == "cuda" else 0
        times[name] = []
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(timed(step, reset, device, lead_in[name]))
    result = {}
    for name, step in steps.items():
        low, *_, high = statistics.quantiles(times[name], n=5) if repeats > 1 else times[name] * 2
        reset()
        peak = peak_memory(step) if device == "cuda" else None
        result[name] = {"ms": statistics.median(times[name]), "ms_p20": low, "ms_p80": high, "peak_gib": peak}
    reset()
    return result


def peak_memory(step: Callable) -> float:
    """Most memory allocated at once during `step`, above what was allocated before it, in GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def logged_means(trainer: Any) -> dict[str, float]:
    """What a trainer has logged since the last call: the mean of each of TRL's metrics and of ours."""
    trainer.remove_callback(PrinterCallback)
    trainer.log({})
    return trainer.state.log_history[-1]


def poison(device: str, gib: float = 8) -> None:
    """Fill with NaN the memory that the next allocations will come from."""
    if device == "cuda":
        blocks = [
            torch.full((int(size * GIB) // 2,), float("nan"), device=device, dtype=torch.bfloat16)
            for size in (gib / 2, gib / 4, gib / 8, gib / 8)
        ]
        del blocks
        small = [torch.full((2**18,), float("nan"), device=device) for _ in range(256)]
        del small


def environment(device: str, commit: str | None) -> dict:
    """Command, commit, processor and versions."""
    if commit is None:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip() or "unknown"
    packages = ("torch", "triton", "trl", "transformers", "liger-kernel")
    packages += ("accelerate", "peft", "deepspeed", "bitsandbytes")
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, **{p: _version(p) for p in packages}}
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "versions": versions,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
