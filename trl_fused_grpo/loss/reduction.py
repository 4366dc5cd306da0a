"""From the loss of each token to a scalar: the weight that a reduction gives to each token."""

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import GRPOBatch, as_divisor
from .objective import GRPOObjective


def token_weights(objective: GRPOObjective, batch: GRPOBatch) -> Tensor:
    """
    Weight of each token's loss in the sum over all tokens `[B, T]`.

    The reductions, and what [`GRPOBatch.normalizer`] counts in each:

    - `"token_mean"`: the mean over all tokens; counts tokens.
    - `"sequence_mean"`: the mean over sequences of the mean over their tokens; counts sequences.
    - `"fixed_length"`: as `"sequence_sum"`, divided by `max_completion_length`; counts sequences.
    - `"sequence_sum"`: the mean over sequences of the sum over their tokens; counts sequences.
    - `"sum"`: the sum over all tokens, divided by a normalizer if there is one.
    - `"padded_sequence_sum"`: the mean over all positions, padding included, of the loss times the length of its
      sequence, see [`luspo_counts_padding`]; counts sequences.

    With a normalizer that counts the whole optimizer step (per process, as gradients are averaged over processes), the
    gradient does not depend on how the step is split into micro-batches.
    """
    reduction = objective.effective_reduction
    mask = batch.mask.float()  # [B, T]
    weights = mask / batch.accumulation  # [B, T]
    if reduction == "token_mean":
        tokens = mask.sum().clamp(min=1.0) if batch.normalizer is None else batch.normalizer
        return weights / tokens
    if reduction == "sum":
        return weights if batch.normalizer is None else weights / batch.normalizer
    sequences = len(mask) if batch.normalizer is None else batch.normalizer
    if reduction == "sequence_mean":
        return weights / sequences / mask.sum(-1, keepdim=True).clamp(min=1.0)
    if reduction == "fixed_length":
        assert objective.max_completion_length is not None
        return weights / (sequences * objective.max_completion_length)
    if reduction == "sequence_sum":
        return weights / sequences
    lengths = mask.sum(-1, keepdim=True)  # [B, 1]
    return (lengths / batch.accumulation / (sequences * mask.shape[1])).expand_as(mask)


def luspo_counts_padding(objective: GRPOObjective, has_kl: bool, has_token_factors: bool) -> bool:
    """
    Return `True` if an objective is LUSPO and counts padding as Liger and TRL before 1.10 do (`"padded_sequence_sum"`).

    They take the mean over all positions. Padding counts where the term differs from token to token, `[B, T]`. Where
    one term holds for the whole sequence, `[B, 1]`, there is no padding to count.
    """
    if objective.loss_type != "luspo" or objective.reduction is not None:
        return False
    return objective.importance_sampling_level == "token" or has_kl or has_token_factors


def entropy_weights(objective: GRPOObjective, batch: GRPOBatch) -> Tensor:
    """Weight of each token's entropy in the loss `[B, T]`: minus the coefficient over the number of tokens."""
    mask = batch.mask.float()  # [B, T]
    count = batch.entropy_normalizer
    if count is None:
        count = mask.sum().clamp(min=1.0) * batch.accumulation
    return -objective.entropy_coef * mask / count


def reduce_loss(objective: GRPOObjective, batch: GRPOBatch, loss: Tensor, entropies: Tensor | None) -> Tensor:
    """The scalar loss, from that of each token `[B, T]` or `[B, 1]` and, for an entropy bonus, entropies `[B, T]`."""
    total = (loss * token_weights(objective, batch)).sum()
    if objective.entropy_coef != 0.0:
        assert entropies is not None, "an entropy bonus needs entropies"
        total = total + (entropies * entropy_weights(objective, batch)).sum()
    return total


def step_normalizer(
    objective: GRPOObjective,
    mask: Tensor,
    num_items_in_batch: Tensor | float | None,
    normalizer: Tensor | float | None,
) -> Tensor | None:
    """
    What the loss of a call is divided by: the normalizer that is given, or the tokens of the step where the loss takes
    these, see [`tokens_per_process`]. `None` stands for the call's own count.
    """
    if num_items_in_batch is not None and normalizer is not None:
        raise ValueError("num_items_in_batch and normalizer exclude each other: pass one of them.")
    num_items_in_batch = as_divisor("num_items_in_batch", num_items_in_batch, mask.device)
    normalizer = as_divisor("normalizer", normalizer, mask.device)
    if objective.uses_global_normalizer:
        return tokens_per_process(mask, num_items_in_batch) if normalizer is None else normalizer
    if num_items_in_batch is not None and objective.reduction is not None:
        raise ValueError(
            f"num_items_in_batch counts tokens, by which reduction={objective.reduction!r} does not divide: pass "
            "normalizer, see the docstring of forward."
        )
    return normalizer


def tokens_per_process(mask: Tensor, num_items_in_batch: Tensor | float | None) -> Tensor:
    """Tokens of the optimizer step, divided by the number of processes, as gradients are averaged; a scalar tensor."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is not None:
        tokens = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=mask.device)
    else:
        tokens = mask.sum()
        if processes > 1:
            dist.all_reduce(tokens)
    return (tokens / processes).clamp(min=1.0)
