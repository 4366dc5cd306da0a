"""Micro-batches that share a pass of the model: log-probabilities come from one forward, the loss is that of each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .dealing import prompt_numbers
from .scoring import HostCall, Question, Scores


# More tokens than this at once gain little on one H200 (`benchmarks/NOTES.md`)
ENOUGH_TOKENS = 16_384


class LossPass:
    """
    Micro-batches whose log-probabilities come from one forward of the model. The host reads them one micro-batch after
    the other, and the backward of the sum of its losses is one too.

    Args:
        micro_batches (`list[dict]`): as the host's `_compute_loss` gets them, all of one shape.
        questions (`list[Question]`): what each asks for.
        last_step (`int`): number of the training step of the last one.
    """

    def __init__(self, micro_batches: list[dict[str, Any]], questions: list[Question], last_step: int):
        self.micro_batches, self.question = micro_batches, Question.joined(questions)
        self._last_step = last_step
        self._current = 0
        self._scores: list[Scores] = []

    def turn_to(self, number: int) -> dict[str, Any]:
        """The micro-batch that the host reads from now on."""
        self._current = number
        return self.micro_batches[number]

    @property
    def inputs(self) -> dict[str, Any]:
        """The micro-batch that the host reads."""
        return self.micro_batches[self._current]

    @property
    def step(self) -> int:
        """The number of its training step."""
        return self._last_step - len(self.micro_batches) + 1 + self._current

    def asks_for(self, completion_ids: Tensor) -> bool:
        """Whether these `[B, T]` are the completions of the micro-batch that the host reads."""
        return self.inputs["completion_ids"].shape == completion_ids.shape

    def scores(self, score: Callable[[Question, HostCall], Scores], call: HostCall) -> Scores:
        """
        The scores of the micro-batch that the host reads; the first `call` has them computed for all.

        Args:
            score (`Callable`): computes the scores of a batch.
            call ([`HostCall`]): the host's, for this micro-batch.
        """
        if len(self.micro_batches) == 1:
            return score(self.question, call)
        if not self._scores:
            sizes = [len(batch["completion_ids"]) for batch in self.micro_batches]
            self._scores = score(self.question, self._of_all(call)).split(sizes)
        return self._scores[self._current]

    def _of_all(self, call: HostCall) -> HostCall:
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        ids, mask = (
            torch.cat([torch.cat([batch[left], batch[right]], dim=1) for batch in self.micro_batches])
            for left, right in names
        )
        return replace(call, input_ids=ids, attention_mask=mask)


def token_limit(batches: list[dict[str, Any]]) -> int:
    """Tokens that a pass may have unless told otherwise: as many as the host's padded micro-batch, or enough."""
    prompt_ids, completion_ids = batches[0]["prompt_ids"], batches[0]["completion_ids"]
    return min(prompt_ids.numel() + completion_ids.numel(), ENOUGH_TOKENS)


def pass_ends(batches: list[dict[str, Any]], limit: int, share_prompts: bool) -> list[int]:
    """
    For each micro-batch of a generation batch, the last one that a pass which begins there may hold.

    Args:
        batches (`list[dict]`): the micro-batches, all of one width.
        limit (`int`): most tokens of a pass of several.
        share_prompts (`bool`): whether a prompt counts once.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    rows = len(prompt_ids)
    prompts = prompt_numbers(prompt_ids, prompt_mask) if share_prompts else list(range(rows))
    prompt_lengths, lengths = torch.stack([prompt_mask.sum(1), completion_mask.sum(1)]).tolist()
    hands = torch.arange(rows).split([len(batch["prompt_ids"]) for batch in batches])

    ends = []
    for start in range(len(batches)):
        tokens, seen, end = 0, set(), start
        for number, hand in enumerate(hands[start:], start):
            for row in hand.tolist():
                tokens += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
                seen.add(prompts[row])
            if tokens > limit:
                break
            end = number
        ends.append(end)
    return ends
