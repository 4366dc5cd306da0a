"""Prompts with images, in the format of each model family."""

from typing import Any

import torch

from .families import IMAGE_ID


IMAGES = (2, 1, 1, 0, 1, 0)  # in each prompt
TOKENS = 4  # of an image


def with_images(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts with their images' tokens after the first word."""
    image = [IMAGE_ID + 2, *[IMAGE_ID] * TOKENS, IMAGE_ID + 3]
    return [[*words[:1], *image * count, *words[1:]] for words, count in zip(prompts, IMAGES, strict=True)]


def image_inputs(family: str, input_ids: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
    """
    The image inputs of a micro-batch.

    Args:
        family (`str`):
            `"qwen2.5-vl"` or `"gemma3-vl"`.
        input_ids (`torch.Tensor`):
            Prompts with their completions `[B, P + T]`.
        generator (`torch.Generator`):
            Draws the pixels.

    Returns:
        `dict[str, Any]`:
            `"num_images"` (a list), `"pixel_values"` (float32) and what tells image tokens from words `[B, P + T]`.
    """
    count = sum(IMAGES)
    is_image = (input_ids == IMAGE_ID).long()  # [B, P + T]
    if family == "gemma3-vl":
        pixels = torch.randn(count, 3, 16, 16, generator=generator)
        return {"num_images": list(IMAGES), "pixel_values": pixels, "token_type_ids": is_image}
    return {
        "num_images": list(IMAGES),
        "pixel_values": torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * count),  # merged two by two
        "mm_token_type_ids": is_image,
    }
