"""Train on problems whose solutions can be checked: all weights, LoRA or QLoRA, in one process or in several.

    python examples/train_text.py                                  # all weights
    python examples/train_text.py --lora --learning_rate 1e-5      # LoRA
    python examples/train_text.py --qlora --learning_rate 1e-5     # LoRA over a base in 4 bits, by bitsandbytes
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/train_text.py --lora
    accelerate launch --config_file examples/accelerate/zero3.yaml examples/train_text.py

Every field of `FusedGRPOConfig` is an option too, and `--config options.yaml` reads them from a file. `--dataset` is a
dataset of the Hub or a folder with JSON lines, which have `prompt`, a list of messages, and `solution`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import TrlParser

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer


@dataclass
class Recipe:
    """What is trained on what."""

    model: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "A model of the Hub, or its folder."})
    dataset: str = field(default="trl-lib/DeepMath-103K", metadata={"help": "A dataset of the Hub, or its folder."})
    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters on all linear layers but the head."})
    qlora: bool = field(default=False, metadata={"help": "The same, over a base model in 4 bits."})


def right_answer(completions: list[Any], solution: list[str], **_: Any) -> list[float | None]:
    """1 where the last line has the solution. `trl.rewards.accuracy_reward` also knows equal ones written otherwise."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right in text.strip().split("\n")[-1]) for text, right in zip(texts, solution, strict=True)]


def brevity(completions: list[Any], **_: Any) -> list[float | None]:
    """A little less for a longer completion: -0.1 for 1000 characters."""
    return [-1e-4 * len(completion[0]["content"]) for completion in completions]


def main(argv: list[str] | None = None) -> FusedGRPOTrainer:
    parser: Any = TrlParser((Recipe, FusedGRPOConfig))  # ty: ignore[invalid-argument-type]
    recipe, args = parser.parse_args_and_config(argv)
    if recipe.qlora:
        args.model_init_kwargs = (args.model_init_kwargs or {}) | {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            )
        }
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if recipe.lora or recipe.qlora else None
    trainer = FusedGRPOTrainer(
        model=recipe.model,
        reward_funcs=[right_answer, brevity],
        args=args,
        train_dataset=load_dataset(recipe.dataset, split="train"),
        peft_config=adapters,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
