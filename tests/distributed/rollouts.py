"""Completions that do not depend on how rows are split over processes: what is drawn, and in which order rows stand."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from trl.trainer import grpo_trainer, rloo_trainer


# Added to the logit of the token that ends a completion, so that completions have many lengths
_END = 4.0
TOOL_CALL = {"name": "multiply", "arguments": {"a": 12, "b": 3}}


class Drawn(LogitsProcessor):
    """
    Leaves of each row's logits the token that this row draws. The random numbers depend on what stands in the row, and
    on how many equal rows stand before it: one process generates all completions of a prompt.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Of the model.
        reads_model (`bool`):
            Whether the model's logits count. Where they do not, tokens are the same under any rounding.
        calls_tool (`bool`):
            Whether the first completion of each prompt is a call of a tool, until the tool has answered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reads_model: bool, calls_tool: bool):
        self.tokenizer, self.reads_model, self.calls_tool = tokenizer, reads_model, calls_tool
        self._calls: dict[int, list[int]] | None = None  # tokens of the call that are left, by row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seeds = self._seeds(input_ids)
        if self._calls is None:
            self._calls = self._calls_of(input_ids, seeds) if self.calls_tool else {}
        left = torch.full_like(scores, float("-inf"))  # [B, V]
        for i, seed in enumerate(seeds):
            call = self._calls.get(i)
            left[i, call.pop(0) if call else self._token(scores[i].float().cpu(), seed)] = 0.0
        return left

    def _seeds(self, input_ids: Tensor) -> list[int]:
        """A number for each row, without its padding."""
        seen: Counter[int] = Counter()
        seeds = []
        for ids in input_ids.cpu():
            key = zlib.crc32(ids[ids != self.tokenizer.pad_token_id].numpy().tobytes())
            seeds.append(key + seen[key])
            seen[key] += 1
        return seeds

    def _token(self, logits: Tensor, seed: int) -> int:
        """By Gumbel's trick: rounding changes the token only where two are almost equally good."""
        noise = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed)).clamp_(1e-6, 1 - 1e-6)
        logits = logits if self.reads_model else torch.zeros_like(logits)
        logits[self.tokenizer.eos_token_id] += _END
        return int((logits - (-noise.log()).log()).argmax())

    def _calls_of(self, input_ids: Tensor, seeds: list[int]) -> dict[int, list[int]]:
        text = f"<tool_call>\n{json.dumps(TOOL_CALL)}\n</tool_call><|im_end|>"
        tokens = self.tokenizer(text).input_ids
        prompts = self.tokenizer.batch_decode(input_ids)
        firsts = {prompt: i for i, prompt in reversed(list(enumerate(prompts))) if "tool_response" not in prompt}
        return {i: list(tokens) for i in firsts.values()}


@contextmanager
def drawn(tokenizer: Any, reads_model: bool = True, calls_tool: bool = False) -> Iterator[None]:
    """While it lasts, `generate` draws as [`Drawn`] does."""
    generate = GenerationMixin.generate
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["logits_processor"] = LogitsProcessorList([Drawn(tokenizer, reads_model, calls_tool)])
        return generate(self, *args, **kwargs)

    with mock.patch.object(GenerationMixin, "generate", drawing):
        yield


@contextmanager
def shuffled_alike(rows: int, micro_batches: int, rank: int, processes: int) -> Iterator[None]:
    """
    While it lasts, TRL shuffles a generation batch in an order that is given. In one process that stands for all of
    several (`rank` is -1), each micro-batch has the rows which these have in theirs.

    Args:
        rows (`int`): of a generation batch of one of the processes.
        micro_batches (`int`): into which a generation batch is split.
        rank, processes (`int`): which process this is, of how many.
    """
    orders = [torch.randperm(rows, generator=torch.Generator().manual_seed(i)) for i in range(processes)]
    if rank < 0:
        placed = [order + i * rows for i, order in enumerate(orders)]
        parts = [order.chunk(micro_batches) for order in placed]
        order = torch.cat([part for each in zip(*parts, strict=True) for part in each])
    else:
        order = orders[rank]
    shuffle = grpo_trainer.shuffle_sequence_dict

    def ordered(batch: Any) -> Any:
        with mock.patch.object(torch, "randperm", return_value=order):
            return shuffle(batch)

    with (
        mock.patch.object(grpo_trainer, "shuffle_sequence_dict", ordered),
        mock.patch.object(rloo_trainer, "shuffle_sequence_dict", ordered),
    ):
        yield
