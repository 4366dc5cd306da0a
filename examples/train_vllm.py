"""Generate with vLLM: in the training processes (colocate), or through HTTP from a server with GPUs of its own.

    accelerate launch --multi_gpu --num_processes 4 examples/train_vllm.py

With a server, which TRL calls `trl vllm-serve` (newer releases of TRL name the `vllm serve` command that it runs):

    CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model Qwen/Qwen3-0.6B
    CUDA_VISIBLE_DEVICES=1,2,3 accelerate launch --multi_gpu --num_processes 3 examples/train_vllm.py --server http://localhost:8000

On-policy, as here, no forward computes old log-probs: the importance ratio of vLLM's log-probs is taken from the
training forward. Every field of `FusedGRPOConfig` is an option too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from trl import TrlParser

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer


@dataclass
class Recipe:
    """What is trained on what, and where it is generated."""

    model: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "A model of the Hub, or its folder."})
    dataset: str = field(default="trl-lib/tldr", metadata={"help": "A dataset of the Hub, or its folder."})
    server: str | None = field(default=None, metadata={"help": "Address of a vLLM server; colocated without."})


def two_hundred_letters(completions: list[str], **_: Any) -> list[float | None]:
    """The nearer a summary is to 200 letters, the better; 0 is best."""
    return [-abs(200 - len(completion)) / 200 for completion in completions]


def main(argv: list[str] | None = None) -> FusedGRPOTrainer:
    parser: Any = TrlParser((Recipe, FusedGRPOConfig))  # ty: ignore[invalid-argument-type]
    parser.set_defaults(
        use_vllm=True,
        vllm_gpu_memory_utilization=0.3,  # colocated: the rest is for the training
        vllm_importance_sampling_mode="sequence_mask",
        fused_skip_old_logps=True,  # says so if it is not possible
    )
    recipe, args = parser.parse_args_and_config(argv)
    args.vllm_mode = "server" if recipe.server else "colocate"
    args.vllm_server_base_url = recipe.server
    trainer = FusedGRPOTrainer(
        model=recipe.model,
        reward_funcs=two_hundred_letters,
        args=args,
        train_dataset=load_dataset(recipe.dataset, split="train"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
