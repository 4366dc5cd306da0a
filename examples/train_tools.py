"""Let the model call a tool. What the tool returns is in the completion, and TRL's tool mask keeps it out of the loss.

    python examples/train_tools.py

Tool results are not projected onto the vocabulary at all: they take no part in the head's matmuls. The log has
`tools/call_frequency` and `tools/failure_frequency`. Tools need transformers 5 and a chat template with tools. Every
field of `FusedGRPOConfig` is an option too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import TrlParser

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer


@dataclass
class Recipe:
    """What is trained, on how many made-up products."""

    model: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "A model of the Hub, or its folder."})
    products: int = field(default=1000, metadata={"help": "How many products are asked for."})


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


def right_product(completions: list[Any], product: list[int], **_: Any) -> list[float | None]:
    """1 where the last message has the product, and 0.2 for a call of the tool."""
    rewards = []
    for messages, right in zip(completions, product, strict=True):
        called = any(message["role"] == "tool" for message in messages)
        rewards.append(float(str(right) in (messages[-1].get("content") or "")) + 0.2 * called)
    return rewards


def make_products(count: int) -> Dataset:
    """Products of numbers of four digits, which small models cannot compute by themselves."""
    draw = random.Random(0)
    pairs = [(draw.randint(1000, 9999), draw.randint(1000, 9999)) for _ in range(count)]
    prompts = [[{"role": "user", "content": f"What is {a} times {b}?"}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "product": [a * b for a, b in pairs]})


def main(argv: list[str] | None = None) -> FusedGRPOTrainer:
    parser: Any = TrlParser((Recipe, FusedGRPOConfig))  # ty: ignore[invalid-argument-type]
    parser.set_defaults(max_completion_length=1024, max_tool_calling_iterations=2)
    recipe, args = parser.parse_args_and_config(argv)
    trainer = FusedGRPOTrainer(
        model=recipe.model,
        reward_funcs=right_product,
        args=args,
        train_dataset=make_products(recipe.products),
        tools=[multiply],
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
