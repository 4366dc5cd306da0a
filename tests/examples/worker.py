"""
One process of a recipe that `accelerate launch` has started, as on GPUs: what it does beside the recipe's own `main` is
to leave the kind of device open, since Accelerate wraps models in DDP alone whenever it knows that a process is on the
CPU. It trains twice: with our trainer and with stock's in its place. Rank 0 writes what was seen.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import trl
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from tests.distributed.engines import parameter_kind

from . import small


def keep_the_engine() -> None:
    """Make Accelerate's state here, for the engine that the launcher's configuration names."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce of its own
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main(name: str, result: Path, words: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))  # a collective that waits longer raises
    recipe = small.load(name)
    seen = {}
    for kind in ("fused", "stock"):
        if kind == "stock":
            recipe.FusedGRPOTrainer = trl.GRPOTrainer
        keep_the_engine()
        trainer = recipe.main([*words, "--output_dir", str(result.with_suffix("") / kind)])
        seen[kind] = {
            "trainer": type(trainer).__name__,
            "world": trainer.accelerator.num_processes,
            "wrapper": type(trainer.model_wrapped).__name__,
            "parameters": sorted({parameter_kind(parameter) for parameter in trainer.model_wrapped.parameters()}),
            "logs": small.logs_of(trainer),
        }
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
