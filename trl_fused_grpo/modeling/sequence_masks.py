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

from trl_fused_grpo._compat import models as model_compat


def build_sequence_masks(original: Callable, lengths: list[int], options: dict[str, Any]) -> Tensor:
    """
    The masks of all sequences, flat and one after the other: for `n` tokens `n * n` numbers.

    Args:
        original (`Callable`): transformers' mask function.
        lengths (`list[int]`): tokens of each sequence in the row.
        options (`dict`): its arguments for the whole row.

    Returns:
        `Tensor`: `[1, 1, 1, N]`, so that a model that looks at it finds a mask.
    """
    masks, rule = [], model_compat.within_one_sequence(options["mask_function"])
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        place = {
            "q_length": length,
            "kv_length": length,
            "q_offset": start,
            "kv_offset": start,
            "cache_position": torch.arange(start, start + length, device=_device(options)),  # transformers < 5.4
        }
        ours = {name: value for name, value in place.items() if name in options}
        ours |= {"mask_function": rule, "batch_size": 1, "attention_mask": None, "allow_is_causal_skip": False}
        masks.append(original(**{**options, **ours}).flatten())
    return torch.cat(masks)[None, None, None]


def _device(options: dict[str, Any]) -> Any:
    position = options.get("cache_position")
    return options.get("device") if position is None else position.device


def are_sequence_masks(mask: Any, lengths: list[int]) -> bool:
    """Whether a mask is one of [`build_sequence_masks`] for these sequences."""
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
