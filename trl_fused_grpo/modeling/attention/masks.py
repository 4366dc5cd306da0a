"""
Masks of more than causality in packed rows, one for each sequence: transformers' own functions build them from the
model's rule, and its own attention runs with them, one sequence after the other.

A multimodal model may let the tokens of an image see each other. Its rule then reads what the row says of each token.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from trl_fused_grpo._compat import models as model_compat


def build_sequence_masks(original: Callable, lengths: list[int], options: dict[str, Any]) -> Tensor:
    """
    The masks of all sequences, flat and one after the other: for `n` tokens `n * n` numbers.

    Returns:
        `Tensor`: `[1, 1, 1, N]`, so that a model that looks at it finds a mask.
    """
    starts = accumulate(lengths, initial=0)
    masks = [build_mask(original, options, start, length) for start, length in zip(starts, lengths, strict=False)]
    return torch.cat([mask.flatten() for mask in masks])[None, None, None]


def build_mask(original: Callable, options: dict[str, Any], start: int, length: int) -> Tensor:
    """The mask `[1, 1, length, length]` of the tokens of a row from `start` on, which are one sequence."""
    place: dict[str, Any] = {
        "q_length": length,
        "kv_length": length,
        "q_offset": start,
        "kv_offset": start,
        "cache_position": torch.arange(start, start + length, device=mask_device(options)),  # transformers < 5.4
    }
    ours = {name: value for name, value in place.items() if name in options}
    rule = model_compat.within_one_sequence(options.get("mask_function", causal_mask_function))
    ours |= {"mask_function": rule, "batch_size": 1, "attention_mask": None, "allow_is_causal_skip": False}
    return original(**{**options, **ours})


def mask_device(options: dict[str, Any]) -> torch.device:
    """The device of the masks that transformers' mask function makes with these arguments."""
    position = options.get("cache_position")
    return torch.device(options.get("device", "cpu")) if position is None else position.device


def are_sequence_masks(mask: Any, lengths: list[int]) -> bool:
    """Return `True` if a mask is one of [`build_sequence_masks`] for these sequences."""
    return isinstance(mask, Tensor) and mask.shape == (1, 1, 1, sum(length * length for length in lengths))


def attend_with_masks(
    original: Callable,
    module: nn.Module,
    query: Tensor,  # [1, heads, S, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,  # [1, key heads, S, D of values]
    masks: Tensor,  # [1, 1, 1, N]
    lengths: list[int],
    options: dict[str, Any],
) -> Tensor:
    """
    Attention of each sequence under its own mask, by the model's attention function with its `options`.

    Returns:
        `Tensor`: `[1, S, heads, D of values]`.
    """
    parts = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    squares = masks.flatten().split([length * length for length in lengths])
    outputs = []
    for q, k, v, mask in zip(*parts, squares, strict=True):
        mask = mask.view(1, 1, q.shape[2], k.shape[2])
        outputs.append(original(module, q, k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1)
