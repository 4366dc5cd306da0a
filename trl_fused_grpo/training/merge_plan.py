"""Which micro-batches of a generation batch may share a forward: those that have few enough tokens together."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.modeling.layout import LayoutName, Rows
from trl_fused_grpo.modeling.layout_choice import traits

from .logps_request import LogpsArgs, LogpsRequest, can_join_images
from .partitioning import prompt_group_ids, rows_by_width, widths_of


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
