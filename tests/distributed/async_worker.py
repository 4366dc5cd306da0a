"""
Trainings of `AsyncGRPOTrainer` in two processes, each in processes of its own: see [`forked`].

Each run leaves the log of each rank, `<run>.<rank>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.torch import save_file

from tests.async_rollouts import make_trainer, stock_on_cpu, train

from .engines import launcher_options, whole_parameters


@dataclass(frozen=True)
class Run:
    """One training."""

    backend: str  # `"ddp"` or `"fsdp2"`
    case: str  # `"plain"`, `"lora"` or `"experts"`
    trainer: str  # `"stock"` or `"fused"`

    processes = 2

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.case}-{self.trainer}"

    @property
    def kind(self) -> str:
        return "qwen3-moe" if self.case == "experts" else "llama"


def _runs(backend: str, case: str) -> list[Run]:
    return [Run(backend, case, trainer) for trainer in ("stock", "fused")]


LAUNCHES = {
    "quick": _runs("ddp", "plain"),
    "others": [*_runs("ddp", "lora"), *_runs("ddp", "experts"), *_runs("fsdp2", "plain"), *_runs("fsdp2", "experts")],
}


def work(run: Run, folder: Path, rank: int) -> None:
    options: dict[str, Any] = {"use_cpu": False, **launcher_options(run.backend)}
    if run.case == "lora":
        adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
        options["peft_config"] = LoraConfig(**adapter)
    with stock_on_cpu() if run.trainer == "stock" else nullcontext():
        trainer = make_trainer(folder, run.trainer == "fused", run.kind, **options)
        moved, logs = train(trainer, whole_parameters)
    if run.trainer == "fused":
        assert trainer._fused.is_on
        assert trainer.fused_stats.recomputed == 0
    if rank == 0:
        save_file({name: value.contiguous() for name, value in moved.items()}, folder / f"{run.name}.safetensors")
    (folder / f"{run.name}.{rank}.json").write_text(json.dumps(logs))
