"""Prompts with images, in the format in which each model family gets them from its processor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .families import IMAGE_ID


IMAGES = (2, 1, 1, 0, 1, 0)  # in each prompt
REPEATED_IMAGES = (1, 1, 1, 0, 2, 0)  # where the first three prompts are one
# In patches of 4 x 4 pixels, of the images in turn. Merged two by two, they have 4 and 8 tokens
_SIZES = ((4, 4), (4, 8))
_PATCH = 4


@dataclass(frozen=True)
class Format:
    """
    How a model family gets images.

    Attributes:
        make (`Callable`): takes the images' sizes in patches and a generator; returns the pixels and their inputs.
        type_ids (`tuple[str, ...]`): names of the inputs that tell image tokens from words.
        sizes (`tuple[tuple[int, int], ...]`): height and width of the images in turn, in patches.
        merged (`int`): how many patches have one token.
    """

    make: Callable[[Sequence[tuple[int, int]], torch.Generator], dict[str, Any]]
    type_ids: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = _SIZES
    merged: int = 4

    def size(self, image: int) -> tuple[int, int]:
        """Of the image with this number in its prompt."""
        return self.sizes[image % len(self.sizes)]


def _patches(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """Qwen and GLM: the patches of all images, each in two frames."""
    count = sum(height * width for height, width in sizes)
    return {
        "pixel_values": torch.randn(count, 3 * 2 * _PATCH * _PATCH, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width] for height, width in sizes]),
    }


def _pixels(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """Gemma-3, LLaVA, Llama-4: images of one size."""
    return {"pixel_values": torch.randn(len(sizes), 3, 4 * _PATCH, 4 * _PATCH, generator=generator)}


def _tiles(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """InternVL: an image is cut into tiles of one size."""
    tiles = sum(height * width for height, width in sizes) // 16
    return {**_pixels(_SIZES[:1] * tiles, generator), "num_tiles": [tiles]}


def _padded_pixels(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """Mistral-3: images of several sizes, padded to the largest."""
    in_pixels = torch.tensor(sizes) * _PATCH
    height, width = in_pixels.amax(0).tolist()
    pixels = torch.zeros(len(sizes), 3, height, width)
    for image, (rows, columns) in zip(pixels, in_pixels.tolist(), strict=True):
        image[:, :rows, :columns] = torch.randn(3, rows, columns, generator=generator)
    return {"pixel_values": pixels, "image_sizes": in_pixels}


def _placed_patches(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """Gemma-4: the patches of each image with their places `(x, y)`, padded to as many as the largest has."""
    patches = [torch.rand(height * width, 3 * _PATCH * _PATCH, generator=generator) for height, width in sizes]
    places = [torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1) for height, width in sizes]
    return {"pixel_values": _padded(patches), "image_position_ids": _padded(places, -1)}


def _shaped_patches(sizes: Sequence[tuple[int, int]], generator: torch.Generator) -> dict[str, Any]:
    """LFM2-VL: the patches of each image, padded to as many as the largest has, with their mask; one tile an image."""
    patches = [torch.randn(height * width, 3 * _PATCH * _PATCH, generator=generator) for height, width in sizes]
    return {
        "pixel_values": _padded(patches),
        "pixel_attention_mask": _padded([torch.ones(len(one), dtype=torch.long) for one in patches]),
        "spatial_shapes": torch.tensor(sizes),
        "num_tiles": [len(sizes)],
    }


def _padded(patches: list[torch.Tensor], value: int = 0) -> torch.Tensor:
    """One row an image, of as many patches as the largest image of a format may have."""
    longest = max(height * width for height, width in _SIZES)
    rows = patches[0].new_full((len(patches), longest, *patches[0].shape[1:]), value)
    for row, one in zip(rows, patches, strict=True):
        row[: len(one)] = one
    return rows


FORMATS = {
    "patches": Format(_patches, ("mm_token_type_ids",)),
    "pixels": Format(_pixels, sizes=_SIZES[:1]),
    "typed-pixels": Format(_pixels, ("token_type_ids",), sizes=_SIZES[:1]),
    "patch-pixels": Format(_pixels, sizes=_SIZES[:1], merged=1),
    "tiles": Format(_tiles),
    "padded-pixels": Format(_padded_pixels),
    "shaped-patches": Format(_shaped_patches),
    "placed-patches": Format(_placed_patches, ("mm_token_type_ids",)),
}


def with_images(prompts: list[list[int]], images: Sequence[int], name: str) -> list[list[int]]:
    """Return prompts with their images' tokens after the first word, in the format of a name."""
    form, results = FORMATS[name], []
    for words, count in zip(prompts, images, strict=True):
        tokens = []
        for height, width in map(form.size, range(count)):
            tokens += [IMAGE_ID + 2, *[IMAGE_ID] * (height * width // form.merged), IMAGE_ID + 3]
        results.append([*words[:1], *tokens, *words[1:]])
    return results


def image_inputs(
    name: str, images: Sequence[int], copies: int, input_ids: torch.Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """
    Make the image inputs of a micro-batch.

    Args:
        name (`str`): format of the images, a name in `FORMATS`.
        images (`Sequence[int]`): how many each prompt has.
        copies (`int`): how many of the first prompts have the same images.
        input_ids (`torch.Tensor`): prompts with their completions `[B, P + T]`.
        generator (`torch.Generator`): draws the pixels.

    Returns:
        `dict[str, Any]`: `"num_images"` (a list), `"pixel_values"` (float32), sizes or places, and what tells image
            tokens from words `[B, P + T]`.
    """
    form, each = FORMATS[name], []
    for row, count in enumerate(images):
        is_copy, sizes = 0 < row < copies, [form.size(image) for image in range(count)]
        each.append(each[0] if is_copy else form.make(sizes, generator) if count else {})
    made = [inputs for inputs in each if inputs]
    inputs: dict[str, Any] = {key: _joined([inputs[key] for inputs in made]) for key in made[0] if key != "num_tiles"}
    if "num_tiles" in made[0]:
        inputs["num_tiles"] = [sum(inputs.get("num_tiles", [0])) for inputs in each]
    is_image = (input_ids == IMAGE_ID).long()  # [B, P + T]
    return {"num_images": list(images), **inputs, **{key: is_image.clone() for key in form.type_ids}}


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Along the first dimension; the others are padded to the largest."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *(slice(size) for size in tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined
