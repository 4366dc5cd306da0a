"""One process of the vLLM recipe on a CPU, colocated or with a server. Rank 0 writes what was seen."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.vllm_weights import keep_linear_weights


keep_linear_weights()  # before TRL is imported

from . import server_on_cpu, small  # noqa: E402


def main(result: Path, words: list[str]) -> None:
    if "--server" in words:
        server_on_cpu.join_without_nccl()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=240))  # one process asks the server for all
    trainer = small.load("train_vllm").main(words)
    if trainer.accelerator.is_main_process:
        seen = {
            "world": trainer.accelerator.num_processes,
            "wrapper": type(trainer.model_wrapped).__name__,
            "mode": trainer.args.vllm_mode,
            "logs": small.logs_of(trainer),
        }
        result.write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
