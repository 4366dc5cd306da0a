"""
Trainings on given micro-batches whose ranks differ, each in processes of its own: see [`forked`].

Each run leaves what each rank saw, `<run>.<rank>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import runs
from .batches import Batch, make
from .engines import launcher_options
from .runs import ACCUMULATION, RANKS
from .worker import build, fed_as_stock, train
from .wrong_forecast import misled


ENGINES = ("ddp", "fsdp2", "zero3", "zero2", "fsdp1")


@dataclass(frozen=True)
class Run(runs.Run):
    """
    One training.

    Attributes:
        backend (`str`): see [`runs.Run`].
        case (`str`): a name of [`micro_batches`], and behind a dash `"lora"` or `"reference"`, see [`runs.Run`].
        trainer (`str`):
            `"stock"`; `"fused"`: each micro-batch has a forward of its own; `"shared"`: micro-batches share forwards;
            `"skipping"`: shared, without the sequences that get no gradient; `"misled"`: shared, and rank 1 alone is
            given a wrong forecast.
    """

    processes = RANKS

    @property
    def data(self) -> str:
        return self.case.split("-")[0]

    @property
    def model(self) -> str:
        return "llama"

    @property
    def shares_forwards(self) -> bool:
        return not self.refers  # whose log-probs are computed for given micro-batches

    @property
    def most_tokens(self) -> int:
        return 0 if self.trainer == "fused" else 1000

    @property
    def adapted(self) -> str:
        return "lora" if self.case.endswith("-lora") else ""

    @property
    def refers(self) -> bool:
        return self.case.endswith("-reference")


def _runs(backend: str) -> list[Run]:
    trainers = {
        "masked": ("stock", "fused", "shared"),
        "masked-lora": ("stock", "shared"),
        "masked-reference": ("stock", "fused"),
        "tools": ("stock", "fused", "shared"),
        "lengths": ("stock", "shared", "misled"),
        "lengths-lora": ("stock", "shared"),
        "still": ("stock", "shared", "skipping"),
    }
    return [Run(backend, case, trainer) for case, names in trainers.items() for trainer in names]


LAUNCHES = {backend: _runs(backend) for backend in ENGINES}


def micro_batches(case: str, folder: Path) -> list[list[Batch]]:
    """
    Micro-batches `[rank][index]`: `"masked"`: rank 1 never has a token, in the second window rank 0 has none either;
    `"tools"`: all that rank 1 has come from tools; `"lengths"`: a few tokens on rank 0, and many on rank 1; `"still"`:
    every advantage of rank 0 is zero.
    """
    lengths = ((1, 3), (90, 121)) if case == "lengths" else ((3, 13),) * RANKS
    batches = make(folder / "llama", lengths, masked=())
    for index, pair in enumerate(zip(*batches, strict=True)):
        if case == "masked":
            pair[1]["completion_mask"].zero_()
            if index // ACCUMULATION == 1:
                pair[0]["completion_mask"].zero_()
        if case == "tools":
            for batch in pair:
                batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
            pair[0]["tool_mask"][:, 1:3] = 0
            pair[1]["tool_mask"].zero_()
        if case == "still":
            pair[0]["advantages"].zero_()
    return batches


def work(run: Run, folder: Path, rank: int) -> None:
    """Train one run."""
    batches = torch.load(folder / f"{run.data}.pt")[rank]
    options: dict[str, Any] = {"fused_skip_zero_grad_sequences": True} if run.trainer == "skipping" else {}
    trainer = build(run, folder, batches, **launcher_options(run.backend), **options)
    with ExitStack() as stack:
        if rank == 1 and run.trainer == "misled":
            stack.enter_context(misled())
        if run.shares_forwards:
            stack.enter_context(fed_as_stock())
        seen, moved = train(trainer)
    (folder / f"{run.name}.{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        save_file(moved, folder / f"{run.name}.safetensors")
