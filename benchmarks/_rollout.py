"""A generation batch with made-up completions, and a trainer that takes them for vLLM's."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_fused_grpo.parity.tiny import FIRST_WORD_ID, PAD_ID


# Mean distance of vLLM's log-probabilities from the model's, in nats, seen on one H200 in bf16
SAMPLER_ERROR = 0.006


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts, uniform between two bounds, and of completions, log-normal with a maximum."""

    prompts: tuple[int, int] = (100, 256)
    median: int = 600
    sigma: float = 0.8
    longest: int = 4096

    def draw(self, groups: int, group: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
        """Lengths of `groups` prompts, each repeated `group` times, and of their completions."""
        shortest, longest = self.prompts
        prompts = torch.randint(shortest, longest + 1, (groups,), generator=generator).repeat_interleave(group)
        normal = torch.randn(groups * group, generator=generator)
        completions = (normal * self.sigma + math.log(self.median)).exp().clamp(1, self.longest)
        return prompts.tolist(), completions.long().tolist()


@dataclass
class Rollout:
    """One generation batch: token ids of prompts and completions, and the sampler's log-probabilities."""

    prompts: list[list[int]]
    completions: list[list[int]]
    log_probs: list[list[float]] | None = None

    @classmethod
    def make(cls, lengths: Lengths, groups: int, group: int, vocab: int, seed: int) -> "Rollout":
        """Draw lengths and random tokens; the prompts of a group are the same."""
        generator = torch.Generator().manual_seed(seed)
        prompt_lengths, completion_lengths = lengths.draw(groups, group, generator)

        def words(count: int) -> list[int]:
            return torch.randint(FIRST_WORD_ID, vocab, (count,), generator=generator).tolist()

        prompts = [words(length) for length in prompt_lengths[::group]]
        return cls([prompts[i // group] for i in range(groups * group)], [words(n) for n in completion_lengths])

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))

    @property
    def width(self) -> int:
        """Columns of TRL's padded batch."""
        return max(map(len, self.prompts)) + max(map(len, self.completions))

    @property
    def padding(self) -> float:
        """Share of TRL's padded batch that is padding."""
        return 1 - self.tokens / (self.width * len(self.prompts))

    def padded(self, device: str) -> dict[str, Tensor]:
        """The batch as TRL pads it: ids and masks, prompts `[B, P]` and completions `[B, T]`."""
        prompt_ids, prompt_mask = _pad(self.prompts, left=True)
        completion_ids, completion_mask = _pad(self.completions, left=False)
        batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}
        batch |= {"completion_ids": completion_ids, "completion_mask": completion_mask}
        return {name: value.to(device) for name, value in batch.items()}

    def model_inputs(self, device: Any) -> dict[str, Any]:
        """What TRL's log-prob method takes beside ids and masks."""
        return {}

    def examples(self) -> list[dict[str, Any]]:
        """The rows of a dataset: one a completion. Their text is never looked at."""
        return [{"prompt": "w5 w6"}] * len(self.prompts)

    def add_sampler_logps(self, trainer: Any, seed: int) -> None:
        """Make up the sampler's log-probabilities: the model's, as `trainer` computes them, and some noise."""
        batch = self.padded(trainer.accelerator.device)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            result = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                ids,
                mask,
                batch["completion_ids"].shape[1],
                batch_size=4,
                **self.model_inputs(trainer.accelerator.device),
            )
        logps = result[0].float().cpu()  # [B, T]
        noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed))
        logps += noise * (SAMPLER_ERROR * math.sqrt(math.pi / 2))
        self.log_probs = [row[: len(ids)].tolist() for row, ids in zip(logps, self.completions, strict=True)]

    def serve(self, trainer: Any) -> None:
        """Have `trainer` take these completions for vLLM's, every time that it generates."""
        trainer.use_vllm = True  # the constructor would start vLLM
        trainer._last_loaded_step = trainer.state.global_step  # there is no engine to synchronise weights with
        output = {"prompt_ids": self.prompts, "completion_ids": self.completions, "logprobs": self.log_probs}
        trainer.rollout_func = lambda prompts, trainer: dict(output)


def _pad(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD_ID)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids, mask
