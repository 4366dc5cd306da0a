"""Which sequences go together: in the sub-batches of a forward, and in rows of one width."""

import torch
from torch import Tensor

from trl_fused_grpo.modeling.layout import LayoutName


def balanced_partitions(lengths: list[int], parts: int, size: int, prompts: list[int] | None = None) -> list[list[int]]:
    """
    Partition sequences into `parts` of at most `size` with about equal numbers of tokens: the longest first, each into
    the part with the fewest tokens that has room.

    Args:
        lengths (`list[int]`): tokens of each sequence.
        parts, size (`int`): `parts * size` is at least the number of sequences.
        prompts (`list[int]`, *optional*):
            Number of each sequence's prompt. Sequences of one prompt then go together, as far as a part has room.

    Returns:
        `list[list[int]]`: indices of each part, in rising order.
    """
    partitions: list[list[int]] = [[] for _ in range(parts)]
    tokens_in = [0] * parts

    def tokens(indices: list[int]) -> int:
        return sum(lengths[i] for i in indices)

    groups = [[i] for i in range(len(lengths))] if prompts is None else _prompt_groups(lengths, prompts, size)
    remaining = sorted(groups, key=lambda indices: (-len(indices), -tokens(indices), indices))
    while remaining:
        indices = remaining.pop(0)
        with_room = [part for part in range(parts) if len(partitions[part]) + len(indices) <= size]
        if not with_room:
            remaining += sorted(([i] for i in indices), key=tokens, reverse=True)
            continue
        shortest = min(with_room, key=lambda part: (tokens_in[part], part))
        partitions[shortest] += indices
        tokens_in[shortest] += tokens(indices)
    return [sorted(partition) for partition in partitions]


def _prompt_groups(lengths: list[int], prompts: list[int], size: int) -> list[list[int]]:
    """Indices of the sequences of each prompt. More than `size` are split into parts of about equal tokens."""
    groups: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    result = []
    for group in groups.values():
        group.sort(key=lambda i: -lengths[i])
        full = len(group) // size
        many, rest = group[: full * size], group[full * size :]
        result += [
            [many[i] for i in partition] for partition in balanced_partitions([lengths[i] for i in many], full, size)
        ]
        result += [rest] if rest else []
    return result


def prompt_group_ids(prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
    """A number for each sequence, the same for the same prompt `[B, P]`."""
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
    Split a batch into as many sub-batches as TRL would.

    With TRL's padding, sequences stay in order. Where rows are padded to the longest, sequences of similar length come
    together. Where rows are packed, sub-batches get about equal numbers of tokens, and sequences of one prompt stay
    together if they share it.

    Args:
        input_ids, attention_mask (`Tensor`): `[B, P + T]`.
        completion_length (`int`): `T`.
        batch_size (`int`): most sequences of a sub-batch.
        layout (`str`): how their rows will be laid out.
        share_prompts (`bool`): whether a prompt stands in a packed row once.

    Returns:
        `list[Tensor]`: indices `[b]` of the sequences of each sub-batch.
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


def widths_of(micro_batches: int, processes: int = 1) -> int:
    """
    In how many widths the aligned rows of several micro-batches go through the model, each in a run of its own.

    They are never more than the micro-batches, and few more for many of them. Several processes have one: in a backward
    for each run, DDP would reduce gradients that are not complete, and in one backward for all, FSDP would hold whole
    gradients of every layer.
    """
    return micro_batches.bit_length() if processes == 1 else 1


def rows_by_width(lengths: list[int], widths: int) -> tuple[list[list[int]], int]:
    """
    Group rows by length so that they have the fewest tokens together, where each is as wide as the longest of its
    group.

    Args:
        lengths (`list[int]`): tokens of each row.
        widths (`int`): the number of groups, at most that of the rows. None is empty.

    Returns:
        `tuple[list[list[int]], int]`: indices of each group, and the tokens, padding included.
    """
    count = len(lengths)
    sizes = torch.tensor(lengths)
    order = sizes.argsort(descending=True, stable=True)
    ends = torch.arange(count + 1)
    in_group = ends.unsqueeze(0) - ends[:-1].unsqueeze(1)  # [rows, ends], rows from the first to before the end
    never = int(sizes.sum()) * count + count + 1
    tokens = (sizes[order].unsqueeze(1) * in_group).masked_fill(in_group <= 0, never)
    best = torch.full((count + 1,), never)  # tokens of the rows before each end
    best[0] = 0
    firsts = []  # of each number of groups: where the last one begins that ends at each end
    for _ in range(widths):
        best, first = (best[:-1].unsqueeze(1) + tokens).min(0)
        best = best.clamp(max=never)
        firsts.append(first)
    groups, end = [], count
    for first in reversed(firsts):
        begin = int(first[end])
        groups.append(order[begin:end].tolist())
        end = begin
    return groups[::-1], int(best[-1])
