"""Which sequences go together: into the micro-batches of a window, and into the sub-batches of a pass."""

from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.modeling.layout import LayoutName


def rebalance(batches: list[dict[str, Any]], layout: LayoutName, share_prompts: bool) -> list[dict[str, Any]]:
    """
    Deal the sequences of a generation batch anew into its micro-batches, each as large as before: about equal in tokens
    where rows are packed, those of one prompt together where they share it, and alike in length where they are padded
    to the longest.

    Batches with anything but one tensor row or scalar per sequence are returned as they are.
    """
    if layout == "padded" or len(batches) == 1:
        return batches
    size = len(batches[0]["completion_ids"])
    rows = {k for k, v in batches[0].items() if isinstance(v, Tensor) and v.dim() > 0}
    others = {k for k, v in batches[0].items() if not isinstance(v, Tensor) and v is not None}
    if others or any(len(batch[k]) != size for batch in batches for k in rows):
        return batches
    whole = {k: torch.cat([batch[k] for batch in batches]) for k in rows}
    lengths = whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)
    if layout == "aligned":
        partitions = lengths.argsort(stable=True).view(len(batches), size).tolist()
    else:
        prompts = prompt_group_ids(whole["prompt_ids"], whole["prompt_mask"]) if share_prompts else None
        partitions = balanced_partitions(lengths.tolist(), len(batches), size, prompts)
    return [
        {**batch, **{k: whole[k][torch.tensor(partition, device=whole[k].device)] for k in rows}}
        for batch, partition in zip(batches, partitions, strict=True)
    ]


def balanced_partitions(lengths: list[int], parts: int, size: int, prompts: list[int] | None = None) -> list[list[int]]:
    """
    Deal sequences into `parts` of at most `size` with about equal numbers of tokens: the longest first, each to the
    lightest part that has room.

    Args:
        lengths (`list[int]`): tokens of each sequence.
        parts, size (`int`): `parts * size` is at least the number of sequences.
        prompts (`list[int]`, *optional*):
            Number of each sequence's prompt. Sequences of one prompt then go together, as far as a part has room.

    Returns:
        `list[list[int]]`: indices of each part, in rising order.
    """
    partitions: list[list[int]] = [[] for _ in range(parts)]
    weights = [0] * parts

    def weight(indices: list[int]) -> int:
        return sum(lengths[i] for i in indices)

    together = [[i] for i in range(len(lengths))] if prompts is None else _families(lengths, prompts, size)
    waiting = sorted(together, key=lambda indices: (-len(indices), -weight(indices), indices))
    while waiting:
        indices = waiting.pop(0)
        roomy = [part for part in range(parts) if len(partitions[part]) + len(indices) <= size]
        if not roomy:
            waiting += sorted(([i] for i in indices), key=weight, reverse=True)
            continue
        lightest = min(roomy, key=lambda part: (weights[part], part))
        partitions[lightest] += indices
        weights[lightest] += weight(indices)
    return [sorted(partition) for partition in partitions]


def _families(lengths: list[int], prompts: list[int], size: int) -> list[list[int]]:
    """Sequences of one prompt together; those of a prompt that has more than `size`, in parts of about equal tokens."""
    families: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        families.setdefault(prompt, []).append(index)
    result = []
    for family in families.values():
        family.sort(key=lambda i: -lengths[i])
        full = len(family) // size
        many, rest = family[: full * size], family[full * size :]
        result += [
            [many[i] for i in partition] for partition in balanced_partitions([lengths[i] for i in many], full, size)
        ]
        result += [rest] if rest else []
    return result


def prompt_group_ids(prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
    """Number sequences by their prompts `[B, P]`: the same for the same prompt."""
    prompts = prompt_ids.masked_fill(~prompt_mask.bool(), -1)
    return torch.unique(prompts, dim=0, return_inverse=True)[1].tolist()


def split_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_length: int,
    batch_size: int,
    layout: LayoutName,
    share_prompts: bool,
) -> list[Tensor]:
    """
    Cut a batch into as many sub-batches as the host would, `[rows]` indices each: as they come in the host's layout,
    neighbours in length together where rows are padded to the longest, equal in tokens where they are packed, those of
    one prompt together where they share it.
    """
    count, device = len(attention_mask), attention_mask.device
    if layout == "padded" or count <= batch_size:
        return list(torch.arange(count, device=device).split(batch_size))
    lengths = attention_mask.sum(1)
    if layout == "aligned":
        return list(lengths.argsort(descending=True, stable=True).split(batch_size))
    prompts = None
    if share_prompts:
        prompts = prompt_group_ids(input_ids[:, :-completion_length], attention_mask[:, :-completion_length])
    parts = -(-count // batch_size)
    # Every sub-batch gets a sequence on every process, whatever the lengths
    return [
        torch.tensor(partition, device=device)
        for partition in balanced_partitions(lengths.tolist(), parts, batch_size, prompts)
    ]
