"""One micro-batch as the objectives read it, and the check of its shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class GRPOBatch:
    """One micro-batch of `B` completions of at most `T` tokens, under TRL's names."""

    mask: Tensor  # loss mask `[B, T]`: TRL's completion mask times its tool mask
    advantages: Tensor  # [B, 1] or `[B, T]`
    # [B, T], nats, or for RLOO their sums `[B, 1]`; `None` where the policy is the old policy
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None  # [B, T], nats; `None` leaves the KL term out
    importance_sampling_ratio: Tensor | None = None  # ratio of policy and vLLM, `[B, T]` or `[B, 1]`
    sampling_per_token_logps: Tensor | None = None  # [B, T], nats, for the off-policy sequence mask
    # Divisor of the summed terms, in tokens or, by reduction, sequences; `None` counts those of this micro-batch
    normalizer: Tensor | float | None = None
    accumulation: float = 1.0  # gradient accumulation steps, 1.0 in evaluation
    entropy_normalizer: Tensor | float | None = None  # divisor of the summed entropies, in tokens


def as_columns(values: Tensor) -> Tensor:
    """Reshape `[B]` to `[B, 1]`; return tensors of more dimensions as they are."""
    return values.unsqueeze(1) if values.dim() == 1 else values


def put_at(places: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Zeros of a shape, with `values` `[n]` at the flat positions `places` `[n]`."""
    return values.new_zeros(shape).flatten().index_put((places,), values).view(shape)


@overload
def zero_masked(values: Tensor, mask: Tensor) -> Tensor: ...
@overload
def zero_masked(values: Tensor | None, mask: Tensor) -> Tensor | None: ...
def zero_masked(values: Tensor | None, mask: Tensor) -> Tensor | None:
    """
    Return `values` as `[B, T]` or `[B, 1]`, detached, in float32, zero where `mask` `[B, T]` is false.

    A mere weight of zero is not enough there, because NaN times zero is NaN. `[B, 1]` is not masked.
    """
    if values is None:
        return None
    values = as_columns(values.detach()).float()
    return torch.where(mask, values, 0.0) if values.shape == mask.shape else values


def check_shapes(
    token_ids: Tensor,  # [B, T]
    per_token: Mapping[str, Tensor | None],  # tensors by name that must be `[B, T]`
    per_sequence: Mapping[str, Tensor | None],  # tensors that must be `[B]`, `[B, 1]` or `[B, T]`
    broadcast: Mapping[str, Tensor | None] | None = None,  # tensors that must be `[B, 1]` or `[B, T]`
    ids_name: str = "token ids",  # what the caller calls the token ids, for the message
) -> None:
    """Raise when a tensor does not fit the token ids. A tensor that is `None` is left out of the check."""
    if token_ids.dim() != 2:
        raise ValueError(f"{ids_name} have shape {list(token_ids.shape)}, but need [B, T].")
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


def as_divisor(name: str, value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """A divisor as a scalar tensor in float32. Zero, as of an optimizer step without tokens, divides zeros to zeros."""
    if value is None:
        return None
    value = torch.as_tensor(value, dtype=torch.float32, device=device)
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must be one number.")
    return value.reshape(()).clamp(min=torch.finfo(value.dtype).tiny)
