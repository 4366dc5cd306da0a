"""Samples of memory, compiled graphs, caches and time, taken in the steps of a training."""

import gc
import random
import resource
import statistics
import sys
import time
from typing import Any

import torch
from _left_over import sizes_of_caches
from transformers import TrainerCallback


class Watcher(TrainerCallback):
    """
    Draws a new longest completion in each step, and takes samples.

    Args:
        steps (`int`): after which the training stops, however often it was started.
        every (`int`): steps between two samples.
    """

    def __init__(self, steps: int, every: int, seed: int = 0):
        self.steps, self.every, self.random = steps, every, random.Random(seed)
        self.trainer: Any = None
        self.samples: list[dict[str, float]] = []
        self.cache_sizes: dict[str, int] = {}
        self.grown: dict[str, list[int]] = {}
        self.done, self._since, self._seconds = 0, 0.0, [0.0]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Another longest completion."""
        trainer = self.trainer
        longest = self.random.randint(8, trainer.max_completion_length)
        trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = longest
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time, and stop in the end."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - self._since)
        self.done += 1
        control.should_training_stop = self.done >= self.steps
        if self.done % self.every == 0:
            self.samples.append(self.sample())

    def sample(self) -> dict[str, float]:
        """What there is now."""
        seconds, self._seconds = statistics.fmean(self._seconds or [0.0]), []
        rss = _rss_mib()  # as it is in a training, before garbage is collected here
        gc.collect()
        objects = gc.get_objects()
        sizes = sizes_of_caches(self.trainer)
        for name, size in sizes.items():
            if size != self.cache_sizes.get(name):
                self.grown.setdefault(name, []).append(size)
        self.cache_sizes = sizes
        memory = _device_memory() if torch.cuda.is_initialized() else {}
        return {
            "step": self.done,
            "seconds": seconds,
            "rss_mib": rss,
            **memory,
            "tensors": sum(issubclass(type(value), torch.Tensor) for value in objects),
            "objects": len(objects),
            "graphs": _graphs(),
            "caches": sum(sizes.values()),
            "kernels": _kernels(),
        }


def _rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def _graphs() -> int:
    """How many graphs torch's compiler has made."""
    compiler = sys.modules.get("torch._dynamo.utils")  # to import it takes seconds
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]


def _kernels() -> int:
    """How many variants Triton has compiled of this package's kernels: each leaves the compiler's memory behind."""
    modules = [file for name, file in sys.modules.items() if name.startswith("trl_fused_grpo.ops.kernels.")]
    caches = [getattr(value, "device_caches", {}) for file in modules for value in vars(file).values()]
    return sum(len(of_device[0]) for cache in caches for of_device in cache.values())


def _device_memory() -> dict[str, float]:
    result = {
        "allocated_mib": torch.cuda.memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.memory_reserved() / 2**20,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }
    torch.cuda.reset_peak_memory_stats()
    return result
