"""
Which sequences processes exchange, so that all have about the same work in each forward. Each of them decides it for
all, from the same integers.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .first_forward import TokenLimits


# Of each sequence of a micro-batch that was exchanged, `[B]`: the process that generated it
GENERATED_BY = "generated_by_process"

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
