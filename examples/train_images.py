"""Train a model that sees: prompts with an image, here with a number of squares that the model is to count.

    python examples/train_images.py --lora

Each row of the dataset has its image in the column `image` (or several in `images`); TRL puts it into the prompt. The
images of a packed row keep their order and the positions that the model gives them. Every field of `FusedGRPOConfig` is
an option too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from PIL import Image, ImageDraw
from trl import TrlParser

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer


@dataclass
class Recipe:
    """What is trained, on how many made-up images."""

    model: str = field(default="Qwen/Qwen2.5-VL-3B-Instruct", metadata={"help": "A model of the Hub, or its folder."})
    images: int = field(default=1000, metadata={"help": "How many images are drawn."})
    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters in the text model."})


def draw_squares(count: int) -> Image.Image:
    """A white image of 224 x 224 pixels with `count` squares in a row, each in a colour of its own."""
    image = Image.new("RGB", (224, 224), "white")
    canvas = ImageDraw.Draw(image)
    for i in range(count):
        canvas.rectangle((8 + 24 * i, 100, 24 + 24 * i, 116), fill=(40 * i % 256, 90 * i % 256, 200 - 20 * i))
    return image


def counted(completions: list[Any], squares: list[int], **_: Any) -> list[float | None]:
    """1 for the right number and nothing else, half of it for a longer answer that has the number, minus its length."""
    rewards = []
    for completion, right in zip(completions, squares, strict=True):
        text = completion[0]["content"].strip()
        rewards.append(0.5 * (text == str(right)) + 0.5 * (str(right) in text) - 1e-4 * len(text))
    return rewards


def main(argv: list[str] | None = None) -> FusedGRPOTrainer:
    parser: Any = TrlParser((Recipe, FusedGRPOConfig))  # ty: ignore[invalid-argument-type]
    recipe, args = parser.parse_args_and_config(argv)
    squares = [random.Random(seed).randint(1, 8) for seed in range(recipe.images)]
    request = [{"role": "user", "content": "How many squares are there? Answer with the number."}]
    dataset = Dataset.from_dict(
        {"prompt": [request] * len(squares), "squares": squares, "image": [draw_squares(count) for count in squares]}
    )
    text_model = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    trainer = FusedGRPOTrainer(
        model=recipe.model,
        reward_funcs=counted,
        args=args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=text_model) if recipe.lora else None,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
