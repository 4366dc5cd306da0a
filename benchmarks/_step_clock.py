"""
Optimizer steps that are timed: their options and a clock. It imports nothing of this project, for peers that patch
what they find.
"""

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import TrainerCallback


GIB = 2**30


def step_options(micro_batch: int, rows: int, group: int, steps: int, longest: int, device: str) -> dict[str, Any]:
    """
    Options of a `GRPOConfig` whose window is the generation batch of `rows` completions, `group` to a prompt, and whose
    steps all start from the same weights; `longest` is in tokens.
    """
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "num_generations": group,
        "max_steps": steps,
        "max_completion_length": longest,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
    }


class StepClock(TrainerCallback):
    """Seconds and peak memory of each optimizer step."""

    def __init__(self, device: str):
        self.device, self.seconds, self.peaks, self.since = device, [], [], 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The micro-batches of the step are there; nothing of them was generated or scored."""
        self._wait()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        self._wait()
        self.seconds.append(time.perf_counter() - self.since)
        print(f"step {state.global_step}: {self.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        self.peaks.append(torch.cuda.max_memory_allocated() if self.device == "cuda" else 0)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def record(self, first: int, last: int | None, tokens: int) -> dict[str, Any]:
        """Median and peak of the steps from `first` up to `last`, which is left out, of `tokens` each."""
        ms = statistics.median(self.seconds[first:last]) * 1e3
        on_gpu = self.device == "cuda"
        return {
            "ms": ms,
            "all_ms": [round(s * 1e3, 1) for s in self.seconds[first:last]],
            "first_step_ms": round(self.seconds[0] * 1e3),
            "peak_gib": max(self.peaks[first:]) / GIB if on_gpu else None,
            "first_peak_gib": self.peaks[0] / GIB if on_gpu else None,
            "tokens_per_s": tokens / ms * 1e3,
        }
