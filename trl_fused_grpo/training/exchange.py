"""
Sequences that processes exchange after generation, so that all have about the same work in each forward.

A sequence keeps its micro-batch: the one of the same number on another process. All processes together then have in
every micro-batch what they had before, and the loss, its gradient and TRL's metrics over all processes stay the same.
Which sequences change places, each process decides for all, from the same integers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .agreement import of_all_processes
from .checks import log_no_effect
from .deferred_ratio import GENERATED_BY
from .engine import LogpsEngine
from .memory import TokenLimits
from .plan import why_not_exchanged


logger = logging.get_logger(__name__)


_PROMPT_FIELDS = {"prompt_ids", "prompt_mask"}  # [B, P], padded left
_COMPLETION_FIELDS = {  # [B, T], padded right
    *("completion_ids", "completion_mask", "tool_mask", "advantages", "importance_sampling_ratio"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
}


def exchanged(
    engine: LogpsEngine,
    batches: list[dict[str, Any]],
    packed: bool,
    windows: list[int],
    limits: Callable[[int], TokenLimits] | None,
    has_images: bool,
) -> list[dict[str, Any]]:
    """
    The micro-batches of a new generation batch after the exchange of sequences between processes, where it is allowed.

    Args:
        engine ([`LogpsEngine`]): knows trainer, options and model.
        batches (`list[dict]`): as TRL has split them.
        packed (`bool`): whether their rows are packed.
        windows (`list[int]`): see [`window_starts`].
        limits (`Callable`, *optional*): see [`token_limits`]; `None` where micro-batches share no forward.
        has_images (`bool`): whether a micro-batch of any process has images.
    """
    trainer, options = engine.trainer, engine.options
    if options.fused_balance is False:
        return batches
    causal_lm = engine.causal_lm(trainer.model)
    reason = why_not_exchanged(trainer, causal_lm, packed, not options.fused_balance, has_images)
    if reason is not None:
        log_no_effect("fused_balance" if options.fused_balance else None, reason)
        logger.info_once(f"Processes exchange no sequences, because {reason}.")
        return batches
    hidden_size = causal_lm.config.get_text_config().hidden_size
    shares_prompts = engine.shares_prompts(trainer.model)
    limits = limits or (lambda padded: TokenLimits(0, 0))
    return exchanged_sequences(trainer.accelerator, batches, limits, windows, hidden_size, shares_prompts)


def exchanged_sequences(
    accelerator: Any,
    batches: list[dict[str, Any]],
    limits: Callable[[int], TokenLimits],
    windows: list[int],
    hidden_size: int,
    share_prompts: bool,
) -> list[dict[str, Any]]:
    """
    Exchange sequences between processes. All of them call this, each with as many micro-batches of one size.

    Args:
        accelerator (`Accelerator`): its processes, each of which has micro-batches of its own.
        batches (`list[dict]`):
            The micro-batches. They are returned as they are when one of any process holds anything but scalars, which
            are the same everywhere, and tensors with one row for each sequence whose padding is known.
        limits (`Callable`): the tokens that forwards may have, given those of a padded micro-batch.
        windows (`list[int]`): see [`window_starts`].
        hidden_size, share_prompts: see [`Work.of`].

    Returns:
        `list[dict]`: the micro-batches, in the widest padding of any process, with [`GENERATED_BY`]. Those that came in
        when nothing is gained.
    """
    size = len(batches[0]["completion_ids"])
    local = [_signature(batches), *(batches[0][name].shape[1] for name in ("prompt_ids", "completion_ids"))]
    masks = [torch.cat([batch[name] for batch in batches]) for name in ("prompt_mask", "completion_mask")]
    keys = _prompt_keys(torch.cat([batch["prompt_ids"] for batch in batches]), masks[0])
    lengths = torch.stack([mask.sum(1) for mask in masks]).flatten().tolist()
    table = of_all_processes(accelerator, "sequences", [*local, *lengths, *keys])  # [R, 3 + 3 * n]
    signatures, widths = table[:, 0], table[:, 1:3].amax(0).tolist()
    if signatures[0] == 0 or (signatures != signatures[0]).any():
        return batches
    prompt_lengths, lengths, keys = table[:, 3:].chunk(3, dim=1)
    work = Work.of(lengths, prompt_lengths, keys, hidden_size, share_prompts)
    forwards = expected_forwards(work, size, limits(size * sum(widths)), windows)
    sources = balanced_sources(work, size, forwards)
    if (sources == torch.arange(sources.numel()).view_as(sources)).all():
        return batches
    whole = _moved(accelerator, _whole(batches, *widths), sources)
    generated_by = sources[accelerator.process_index] // sources.shape[1]
    whole[GENERATED_BY] = generated_by.to(accelerator.device)
    parts = zip(*(value.split(size) for value in whole.values()), strict=True)
    return [{**batch, **dict(zip(whole, part, strict=True))} for batch, part in zip(batches, parts, strict=True)]


def _prompt_keys(prompt_ids: Tensor, prompt_mask: Tensor) -> list[int]:
    """A number for each prompt `[n, P]` that is the same on every process. Two prompts with one number cost time."""
    rows = zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)
    return [crc32(ids[mask].numpy().tobytes()) for ids, mask in rows]


def _signature(batches: list[dict[str, Any]]) -> int:
    """A number for what micro-batches hold, the same where their sequences can be exchanged; zero where they cannot."""
    kinds = [_kinds(batch) for batch in batches]
    if any(kind is None or kind != kinds[0] for kind in kinds):
        return 0
    return crc32(repr(kinds[0]).encode()) or 1


def _kinds(batch: dict[str, Any]) -> list[tuple] | None:
    """What each field of a micro-batch is, in the order of their names; `None` where one cannot move."""
    size, widths = len(batch["completion_ids"]), [batch[name].shape[1] for name in ("prompt_ids", "completion_ids")]
    kinds: list[tuple] = []
    for name, value in sorted(batch.items()):
        if not isinstance(value, Tensor) or value.dim() == 0:
            if value is not None and not isinstance(value, (Tensor, bool, int, float, str)):
                return None
            kinds.append((name, value.item() if isinstance(value, Tensor) else value))
            continue
        width = widths[0] if name in _PROMPT_FIELDS else widths[1] if name in _COMPLETION_FIELDS else None
        is_padded = value.dim() == 2 and value.shape[1] == width
        if len(value) != size or value.dim() > 2 or (value.dim() == 2 and not is_padded and value.shape[1] != 1):
            return None
        kinds.append((name, str(value.dtype), value.dim(), is_padded))
    return kinds


def _whole(batches: list[dict[str, Any]], prompt_width: int, completion_width: int) -> dict[str, Tensor]:
    """The sequences of all micro-batches, `[n]` or `[n, W]` for each field, in the widest padding of any process."""
    widths = [batches[0][name].shape[1] for name in ("prompt_ids", "completion_ids")]
    before, behind = prompt_width - widths[0], completion_width - widths[1]
    whole = {}
    for name, first in sorted(batches[0].items()):  # in one order on all processes
        if not isinstance(first, Tensor) or first.dim() == 0:
            continue
        value = torch.cat([batch[name] for batch in batches])
        if name in _PROMPT_FIELDS:
            value = F.pad(value, (before, 0))
        elif name in _COMPLETION_FIELDS and value.dim() == 2 and value.shape[1] == widths[1]:
            value = F.pad(value, (0, behind), value=1 if name == "importance_sampling_ratio" else 0)
        whole[name] = value
    return whole


def _moved(accelerator: Any, whole: dict[str, Tensor], sources: Tensor) -> dict[str, Tensor]:
    """Send sequences to where they belong, see [`balanced_sources`]; all fields of a sequence in one piece."""
    me, (processes, count), device = accelerator.process_index, sources.shape, accelerator.device
    owners, places = sources // count, sources % count
    to_send = [places[to][(owners[to] == me) & (to != me)] for to in range(processes)]
    to_fill = [((owners[me] == other) & (other != me)).nonzero().flatten() for other in range(processes)]
    own = torch.where(owners[me] == me, places[me], torch.arange(count)).to(device)
    fields = [value.unsqueeze(1) if value.dim() == 1 else value for value in whole.values()]
    leaving, filled = torch.cat(to_send).to(device), torch.cat(to_fill).to(device)
    sent = torch.cat([value[leaving].view(torch.uint8) for value in fields], dim=1)
    received = sent.new_empty(len(filled), sent.shape[1])
    dist.all_to_all_single(received, sent, [len(p) for p in to_fill], [len(p) for p in to_send])
    ends = list(accumulate((value.shape[1] * value.element_size() for value in fields), initial=0))
    result = {}
    for (name, value), field, (start, end) in zip(whole.items(), fields, pairwise(ends), strict=True):
        rows = field[own]
        rows[filled] = received[:, start:end].clone(memory_format=torch.contiguous_format).view(field.dtype)
        result[name] = rows.view(len(rows), *value.shape[1:])
    return result


_TOLERANCE = 0.01  # no sequence is moved for less of the mean work
_PARTNERS = 8  # processes with the least work that the one with the most looks at


@dataclass(frozen=True)
class Work:
    """
    The work of all sequences of a generation batch, by process and place in it, `[R, n]` each, int64.

    Args:
        tokens (`Tensor`): of the completion, and of the prompt where each sequence has a copy of its own.
        prompt_tokens (`Tensor`): of the prompt where it is shared; else zero.
        prompts (`Tensor`): numbers of the prompts, from zero on.
        cost (`Tensor`): time for `tokens`, in one unit with `prompt_cost`.
        prompt_cost (`Tensor`): time for `prompt_tokens`.
    """

    tokens: Tensor
    prompt_tokens: Tensor
    prompts: Tensor
    cost: Tensor
    prompt_cost: Tensor

    @classmethod
    def of(cls, lengths: Tensor, prompt_lengths: Tensor, keys: Tensor, hidden_size: int, share_prompts: bool) -> "Work":
        """
        Estimate the work of sequences.

        Args:
            lengths, prompt_lengths (`Tensor`): `[R, n]`: tokens of completions and prompts.
            keys (`Tensor`): `[R, n]`: the same for the same prompt.
            hidden_size (`int`): of the model. A token's attention to `L` others costs about `L / (6 * hidden_size)` of
                all else that is computed for it.
            share_prompts (`bool`): whether a prompt stands in a row once.
        """
        prompt_lengths = prompt_lengths * (lengths > 0)  # without a completion nothing goes through the model
        cost = lengths * (12 * hidden_size + 2 * prompt_lengths + lengths)
        prompt_cost = prompt_lengths * (12 * hidden_size + prompt_lengths)
        prompts = keys.unique(return_inverse=True)[1].view_as(keys)
        if share_prompts:
            return cls(lengths, prompt_lengths, prompts, cost, prompt_cost)
        none = torch.zeros_like(lengths)
        return cls(lengths + prompt_lengths, none, prompts, cost + prompt_cost, none)

    def at(self, places: slice) -> "Work":
        """The work of some places of each process."""
        return Work(*(value[:, places].clone() for value in vars(self).values()))


def expected_forwards(work: Work, size: int, limits: TokenLimits, windows: list[int]) -> list[tuple[int, int]]:
    """
    The forwards that micro-batches will probably share when all processes have equally much: number of the first one,
    and of the one behind the last.

    Args:
        work ([`Work`]): of all sequences.
        size (`int`): sequences of a micro-batch.
        limits ([`TokenLimits`]): most tokens of a forward with several micro-batches.
        windows (`list[int]`): numbers with which an accumulation window begins; no forward goes beyond it.
    """
    processes, count = work.tokens.shape
    starts, tokens, seen, limit = [0], 0, set(), limits.others
    for number, place in enumerate(range(0, count, size)):
        part = work.at(slice(place, place + size))
        numbers, lengths = part.prompts.tolist(), part.prompt_tokens.tolist()
        prompts = {(r, key): n for r in range(processes) for key, n in zip(numbers[r], lengths[r], strict=True)}
        more = int(part.tokens.sum()) + sum(n for key, n in prompts.items() if key not in seen)
        # A little less than the limit, so that it holds for each process
        if number in windows or tokens + more > 0.98 * limit * processes:
            starts += [number] if number else []
            tokens, seen, more = 0, set(), int(part.tokens.sum()) + sum(prompts.values())
            limit = limits.first if number in windows else limits.others
        tokens, seen = tokens + more, seen | prompts.keys()
    return list(pairwise([*starts, count // size]))


def balanced_sources(work: Work, size: int, forwards: list[tuple[int, int]]) -> Tensor:
    """
    Decide which sequence goes to which place, so that every process has about the same work in each forward. Numbers
    are integers, so that all processes decide alike.

    Two sequences of one micro-batch change places at a time: one of the process with the most work, and one of a
    process with little, as long as that takes at least a [`_TOLERANCE`] away. A prompt that has no other completion in
    the forward moves along and counts. So few sequences move, and completions of one prompt stay together where they
    can.

    Args:
        work ([`Work`]): of all sequences.
        size (`int`): sequences of a micro-batch.
        forwards (`list[tuple[int, int]]`): see [`expected_forwards`].

    Returns:
        `Tensor`: `[R, n]`: the sequence for each place, as its process times `n` plus its place there.
    """
    processes, count = work.cost.shape
    sources = torch.arange(processes * count).view(processes, count)
    for start, end in forwards:
        places = slice(start * size, end * size)
        _balance(work.at(places), size, sources[:, places])
    return sources


def _balance(work: Work, size: int, sources: Tensor) -> None:
    """Change places within one forward, in place."""
    counts = torch.zeros(len(sources), int(work.prompts.max()) + 1, dtype=torch.long)
    counts.scatter_add_(1, work.prompts, torch.ones_like(work.prompts))
    for _ in range(sources.numel()):
        loads = _loads(work, counts)
        least_gain = int(loads.sum()) * _TOLERANCE / len(loads)
        order = loads.argsort(stable=True)
        most, partners = int(order[-1]), order[:-1][:_PARTNERS]
        scores = _loads_after(work, counts, loads, most, partners, size)  # [partners, micro-batches, size, size]
        best = int(scores.argmin())
        if loads[most] - scores.flatten()[best] < least_gain:
            return
        partner, number, first, second = torch.unravel_index(torch.tensor(best), scores.shape)
        one, other = (most, int(number * size + first)), (int(partners[partner]), int(number * size + second))
        for values in (*vars(work).values(), sources):
            values[one], values[other] = values[other].clone(), values[one].clone()
        for (process, place), gone in ((one, other), (other, one)):
            counts[process, work.prompts[process, place]] += 1
            counts[process, work.prompts[gone]] -= 1


def _loads(work: Work, counts: Tensor) -> Tensor:
    """The cost of each process `[R]`: a shared prompt counts once."""
    cost_of = torch.zeros(counts.shape[1], dtype=torch.long)
    cost_of[work.prompts.flatten()] = work.prompt_cost.flatten()
    return work.cost.sum(1) + ((counts > 0) * cost_of).sum(1)


def _loads_after(work: Work, counts: Tensor, loads: Tensor, most: int, partners: Tensor, size: int) -> Tensor:
    """
    The greater load of two processes after a sequence of the one, `most`, changed places with one of the other, a
    partner: `[partners, micro-batches, size, size]`.
    """

    def in_micro_batches(values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, size))

    mine, theirs = in_micro_batches(work.prompts[most]).unsqueeze(-1), work.prompts[partners]
    theirs = in_micro_batches(theirs).unsqueeze(-2)  # mine: [m, size, 1], theirs: [partners, m, 1, size]
    my_cost = in_micro_batches(work.cost[most]).unsqueeze(-1)
    their_cost = in_micro_batches(work.cost[partners]).unsqueeze(-2)
    my_prompt = in_micro_batches(work.prompt_cost[most]).unsqueeze(-1)
    their_prompt = in_micro_batches(work.prompt_cost[partners]).unsqueeze(-2)
    rows = torch.arange(len(partners)).view(-1, 1, 1, 1)
    differ = mine != theirs  # completions of one prompt leave the prompts as they are
    leaves_me, comes_to_me = counts[most][mine] == 1, counts[most][theirs] == 0
    leaves_them, comes_to_them = counts[partners][rows, theirs] == 1, counts[partners][rows, mine] == 0
    after = loads[most] - my_cost + their_cost + differ * (comes_to_me * their_prompt - leaves_me * my_prompt)
    theirs_after = loads[partners].view(-1, 1, 1, 1) - their_cost + my_cost
    theirs_after = theirs_after + differ * (comes_to_them * my_prompt - leaves_them * their_prompt)
    return torch.maximum(after, theirs_after)
