"""
What goes together: sequences in the sub-batches of a forward and in rows of one width, and micro-batches in a forward
that they share, as long as they have few enough tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.modeling.layout import LayoutName, Rows
from trl_fused_grpo.modeling.layout_choice import traits

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


def window_starts(count: int, steps_left: int, steps: int) -> list[int]:
    """
    The numbers of the micro-batches of a generation batch with which an accumulation window begins.

    Args:
        count (`int`): of micro-batches.
        steps_left (`int`): micro-batches until the current accumulation window ends, 0 where that is not known.
        steps (`int`): micro-batches of a window.
    """
    return [*([0] if steps_left == steps else []), *range(steps_left or steps, count, steps)]


def plan_merges(
    batches: list[dict[str, Any]],
    limits: Iterable[int],
    share_prompts: bool,
    layout: LayoutName = "packed",
    needs_last_column: bool = False,
    in_one_width: bool = False,
) -> list[list[int]]:
    """
    Decide which micro-batches of a generation batch may share a forward. None do where a row has holes in its mask:
    such rows keep TRL's padding.

    Args:
        batches (`list[dict]`): the micro-batches, all of one width.
        limits (`Iterable[int]`): most tokens that several may have together, for each plan.
        share_prompts (`bool`): whether a prompt counts once, in packed rows.
        layout (`str`): `"packed"` or `"aligned"`, whose rows are as long as the longest of their width.
        needs_last_column (`bool`): see [`layout_choice.Traits`].
        in_one_width (`bool`): whether aligned rows are counted as wide as the longest of all.

    Returns:
        `list[list[int]]`:
            for each limit and each micro-batch, the index of the last one that may share its forward.
    """
    counter = _token_counter(batches, share_prompts, layout, needs_last_column, in_one_width)
    if counter is None:
        return [list(range(len(batches))) for _ in limits]

    def end_of(start: int, limit: int) -> int:
        tokens, end = counter(), start
        for index in range(start, len(batches)):
            if tokens(index) > limit or not can_join_images(batches[start : index + 1]):
                break
            end = index
        return end

    return [[end_of(start, limit) for start in range(len(batches))] for limit in limits]


def tokens_of_forward(engine: Any, logps_request: LogpsRequest, call: LogpsArgs, layout: LayoutName) -> int:
    """
    Tokens that the model runs in a forward, padding included, counted as [`plan_merges`] counts them.

    Args:
        engine ([`LogpsEngine`]): whose forward it is.
        logps_request ([`LogpsRequest`]): of its micro-batches.
        call ([`LogpsArgs`]): their rows.
        layout (`str`): of these.
    """
    causal_lm = engine.causal_lm(call.model)
    needs_last_column = traits(causal_lm).needs_last_column
    in_one_width = needs_last_column or engine.trainer.accelerator.num_processes > 1
    batches = call.as_micro_batches(logps_request.micro_batch)
    options = engine.shares_prompts(call.model), layout, needs_last_column, in_one_width
    counter = None if layout == "padded" else _token_counter(batches, *options)
    if counter is None:
        return call.input_ids.numel()
    tokens = counter()
    return [tokens(index) for index in range(len(batches))][-1]


def _token_counter(
    batches: list[dict[str, Any]], share_prompts: bool, layout: LayoutName, needs_last_column: bool, in_one_width: bool
) -> Callable[[], Callable[[int], int]] | None:
    """
    Makes functions that are given the indices of micro-batches, one after the other, and return their tokens so far.
    `None` where a row has holes in its mask.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    count, is_packed = len(prompt_ids), layout == "packed"
    prompts = prompt_group_ids(prompt_ids, prompt_mask) if share_prompts and is_packed else list(range(count))
    holes = _holes(prompt_mask, completion_mask)
    # Rows that must reach TRL's last column are counted from their first token on
    columns = (prompt_mask.cumsum(1) > 0).sum(1) + completion_mask.shape[1]
    counts = torch.stack([prompt_mask.sum(1), completion_mask.sum(1), columns, holes])
    prompt_lengths, lengths, columns, has_holes = counts.tolist()
    if any(has_holes):
        return None
    sequences_of = [rows.tolist() for rows in torch.arange(count).split([len(b["prompt_ids"]) for b in batches])]
    whole = columns if needs_last_column else [sum(pair) for pair in zip(prompt_lengths, lengths, strict=True)]

    def counter() -> Callable[[int], int]:
        tokens = _packed_tokens(prompts, prompt_lengths, lengths) if is_packed else _aligned_tokens(whole, in_one_width)
        return lambda index: tokens(sequences_of[index])

    return counter


def _packed_tokens(prompts: list[int], prompt_lengths: list[int], lengths: list[int]) -> Callable[[list[int]], int]:
    """A function that is given one micro-batch after the other and returns their tokens so far: a prompt's once."""
    total, seen = 0, set()

    def tokens(sequences: list[int]) -> int:
        nonlocal total
        for row in sequences:
            total += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
            seen.add(prompts[row])
        return total

    return tokens


def _aligned_tokens(lengths: list[int], in_one_width: bool) -> Callable[[list[int]], int]:
    """The same for aligned rows, padding included; `in_one_width` where all are as wide as the longest."""
    so_far: list[int] = []
    micro_batches = 0

    def tokens(sequences: list[int]) -> int:
        nonlocal micro_batches
        micro_batches += 1
        so_far.extend(lengths[row] for row in sequences)
        return rows_by_width(so_far, 1 if in_one_width else widths_of(micro_batches))[1]

    return tokens


def _holes(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Which sequences `[B]`, bool, have holes in their masks `[B, P]` and `[B, T]`."""
    selected, mask = completion_mask.bool(), torch.cat([prompt_mask, completion_mask], dim=1)
    in_model = selected.any(1)
    rows = Rows(mask, mask, completion_mask.shape[1], selected, in_model)  # token ids do not matter
    return rows.with_holes(mask.bool() & in_model.unsqueeze(1))
