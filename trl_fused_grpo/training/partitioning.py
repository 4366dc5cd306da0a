"""
What goes together: sequences in the sub-batches of a forward, and micro-batches in a forward that they share, as long
as they have few enough tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.modeling.rows.layout import Rows

from .logps_request import LogpsArgs, LogpsRequest, can_join_images


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
    packed: bool,
    share_prompts: bool,
) -> list[Tensor]:
    """
    Split a batch into as many sub-batches as TRL would.

    With TRL's padding, sequences stay in order. Where rows are `packed`, sub-batches get about equal numbers of tokens,
    and sequences of one prompt stay together if they share it.

    Args:
        input_ids, attention_mask (`Tensor`): `[B, P + T]`.
        completion_length (`int`): `T`.
        batch_size (`int`): most sequences of a sub-batch.
        packed (`bool`): how their rows will be laid out.
        share_prompts (`bool`): whether a prompt stands in a packed row once.

    Returns:
        `list[Tensor]`: indices `[b]` of the sequences of each sub-batch.
    """
    count, device = len(attention_mask), attention_mask.device
    if not packed or count <= batch_size:
        return list(torch.arange(count, device=device).split(batch_size))
    prompts = None
    if share_prompts:
        prompts = prompt_group_ids(input_ids[:, :-completion_length], attention_mask[:, :-completion_length])
    parts = -(-count // batch_size)
    # Every sub-batch gets a sequence on every process, whatever the lengths
    return [
        torch.tensor(partition, device=device)
        for partition in balanced_partitions(attention_mask.sum(1).tolist(), parts, batch_size, prompts)
    ]


def plan_merges(batches: list[dict[str, Any]], limits: Iterable[int], share_prompts: bool) -> list[list[int]]:
    """
    Decide which micro-batches of a generation batch may share a forward of packed rows. None do where a row has holes
    in its mask: such rows keep TRL's padding.

    Args:
        batches (`list[dict]`): the micro-batches, all of one width.
        limits (`Iterable[int]`): most tokens that several may have together, for each plan.
        share_prompts (`bool`): whether a prompt counts once.

    Returns:
        `list[list[int]]`:
            for each limit and each micro-batch, the index of the last one that may share its forward.
    """
    tokens_from = _token_counter(batches, share_prompts)
    if tokens_from is None:
        return [list(range(len(batches))) for _ in limits]

    def end_of(start: int, limit: int) -> int:
        end = start
        for index, tokens in enumerate(tokens_from(start), start):
            if tokens > limit or not can_join_images(batches[start : index + 1]):
                break
            end = index
        return end

    return [[end_of(start, limit) for start in range(len(batches))] for limit in limits]


def tokens_of_forward(engine: Any, logps_request: LogpsRequest, call: LogpsArgs) -> int:
    """
    Tokens that the model runs in a forward, padding included, counted as [`plan_merges`] counts them.

    Args:
        engine ([`LogpsEngine`]): whose forward it is.
        logps_request ([`LogpsRequest`]): of its micro-batches.
        call ([`LogpsArgs`]): their rows.
    """
    if not engine.packs(call.model, logps_request.reads_padding):
        return call.input_ids.numel()
    batches = call.as_micro_batches(logps_request.micro_batch)
    tokens_from = _token_counter(batches, engine.shares_prompts(call.model))
    return call.input_ids.numel() if tokens_from is None else [*tokens_from(0)][-1]


def _token_counter(batches: list[dict[str, Any]], share_prompts: bool) -> Callable[[int], Iterator[int]] | None:
    """
    A function that yields the tokens of the micro-batches from an index on, up to each of them: a prompt's once if they
    share it. `None` where a row has holes in its mask.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    count = len(prompt_ids)
    prompts = prompt_group_ids(prompt_ids, prompt_mask) if share_prompts else list(range(count))
    holes = _holes(prompt_mask, completion_mask)
    prompt_lengths, lengths, has_holes = torch.stack([prompt_mask.sum(1), completion_mask.sum(1), holes]).tolist()
    if any(has_holes):
        return None
    sequences_of = [rows.tolist() for rows in torch.arange(count).split([len(b["prompt_ids"]) for b in batches])]

    def tokens_from(start: int) -> Iterator[int]:
        total, seen = 0, set()
        for sequences in sequences_of[start:]:
            for row in sequences:
                total += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
                seen.add(prompts[row])
            yield total

    return tokens_from


def _holes(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Which sequences `[B]`, bool, have holes in their masks `[B, P]` and `[B, T]`."""
    selected, mask = completion_mask.bool(), torch.cat([prompt_mask, completion_mask], dim=1)
    in_model = selected.any(1)
    rows = Rows(mask, mask, completion_mask.shape[1], selected, in_model)  # token ids do not matter
    return rows.with_holes(mask.bool() & in_model.unsqueeze(1))
