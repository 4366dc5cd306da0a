"""One micro-batch as the objectives read it, and the checks that it fits together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class GRPOBatch:
    """
    One micro-batch, under TRL's names.

    Args:
        mask (`Tensor`): loss mask `[B, T]`: the completion mask times the tool mask.
        advantages (`Tensor`): `[B, 1]` or `[B, T]`.
        old_per_token_logps (`Tensor`, *optional*): `[B, T]`; `None` where the policy is the old policy.
        ref_per_token_logps (`Tensor`, *optional*): `[B, T]`; `None` leaves the KL term out.
        importance_sampling_ratio (`Tensor`, *optional*): vLLM's, `[B, T]` or `[B, 1]`.
        sampling_per_token_logps (`Tensor`, *optional*): `[B, T]`, what the off-policy sequence mask compares with.
        normalizer (`Tensor` or `float`, *optional*): what the sum is divided by; `None` counts this micro-batch.
        accumulation (`float`): gradient accumulation steps, 1.0 in evaluation.
        entropy_normalizer (`Tensor` or `float`, *optional*): what the entropy bonus divides the sum of entropies by.
    """

    mask: Tensor
    advantages: Tensor
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    normalizer: Tensor | float | None = None
    accumulation: float = 1.0
    entropy_normalizer: Tensor | float | None = None


def as_columns(values: Tensor) -> Tensor:
    """`[B]` becomes `[B, 1]`; the rest stays."""
    return values.unsqueeze(1) if values.dim() == 1 else values


@overload
def zero_masked(values: Tensor, counted: Tensor) -> Tensor: ...
@overload
def zero_masked(values: Tensor | None, counted: Tensor) -> Tensor | None: ...
def zero_masked(values: Tensor | None, counted: Tensor) -> Tensor | None:
    """Zero for whatever stands where nothing counts `[B, T]`: NaN times a zero weight would be NaN."""
    if values is None:
        return None
    values = as_columns(values.detach()).float()
    return torch.where(counted, values, 0.0) if values.shape == counted.shape else values


def check_shapes(
    token_ids: Tensor,
    per_token: Mapping[str, Tensor | None],
    per_sequence: Mapping[str, Tensor | None],
    broadcast: Mapping[str, Tensor | None] | None = None,
    ids_name: str = "token ids",
) -> None:
    """
    Raise when a tensor does not fit the token ids. A tensor that is `None` is left out of the check.

    Args:
        token_ids (`Tensor`): `[B, T]`.
        per_token (`dict[str, Tensor]`): tensors by name that must be `[B, T]`.
        per_sequence (`dict[str, Tensor]`): tensors that must be `[B]`, `[B, 1]` or `[B, T]`.
        broadcast (`dict[str, Tensor]`, *optional*): tensors that must be `[B, 1]` or `[B, T]`.
        ids_name (`str`): what the caller calls the token ids, for the message.

    Raises:
        `ValueError`: naming the tensor, its shape and the shapes that fit.
    """
    batch, length = token_ids.shape
    whole, column, vector = (batch, length), (batch, 1), (batch,)
    groups = ((per_token, [whole]), (per_sequence, [vector, column, whole]), (broadcast or {}, [column, whole]))
    for tensors, shapes in groups:
        for name, value in tensors.items():
            if value is not None and tuple(value.shape) not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes)
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, but {ids_name} of shape {list(whole)} need {expected}."
                )
