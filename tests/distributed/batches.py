"""Micro-batches for two ranks, and the same rows as one process would get them."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from trl_fused_grpo.parity.tiny import EOS_ID, FIRST_WORD_ID, PAD_ID, VOCAB_SIZE

from .runs import ACCUMULATION, RANKS, ROWS, STEPS


Batch = dict[str, torch.Tensor]


# (rank, micro-batch) whose every completion token is masked: one that accumulates, and one that ends a step
MASKED = {(1, 2), (0, 5)}

# Old minus current log-probs: their ratios keep away from the clip bounds 0.8 and 1.2, so that rounding crosses none
_DRIFT = (-0.6, -0.3, -0.1, -0.03, 0.05, 0.1, 0.5)
_RATIOS = (0.4, 0.9, 1.0, 1.3, 2.0)


def make(
    checkpoint: Path,
    lengths: Sequence[tuple[int, int]] = ((3, 13),) * RANKS,
    masked: Collection[tuple[int, int]] = MASKED,
    accumulation: int = ACCUMULATION,
) -> list[list[Batch]]:
    """
    Micro-batches `[rank][index]` with log-probs near those of the checkpoint's model. `lengths` has the fewest tokens
    of a completion of each rank, and the first number that is too many. `accumulation`: micro-batches of a window.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    return of_each_rank(
        lambda rank, i: _micro_batch(model, generator, lengths[rank], (rank, i) in masked), accumulation
    )


def of_each_rank(make_one: Callable[[int, int], Batch], accumulation: int = ACCUMULATION) -> list[list[Batch]]:
    """Micro-batches `[rank][index]`, made from the two numbers, with the tokens of their accumulation windows."""
    indices = range(STEPS * accumulation)
    made = [[make_one(rank, i) for i in indices] for rank in range(RANKS)]
    for start in indices[::accumulation]:
        accumulated = [batch for batches in made for batch in batches[start : start + accumulation]]
        tokens = sum(batch["completion_mask"].sum() for batch in accumulated)
        for batch in accumulated:
            batch["num_items_in_batch"] = torch.as_tensor(tokens).clone()
    return made


def union(batches_of_ranks: list[list[Batch]]) -> list[Batch]:
    """The rows of all ranks in one micro-batch, padded to one width."""
    return [join(batches) for batches in zip(*batches_of_ranks, strict=True)]


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches in one, padded to one width."""
    joined = {}
    for name in batches[0].keys() - {"num_items_in_batch"}:
        rows = [row for batch in batches for row in batch[name]]
        is_padded = name.startswith(("prompt", "completion", "old", "tool"))
        joined[name] = padded(rows, left=name.startswith("prompt")) if is_padded else torch.stack(rows)
    return {**joined, "num_items_in_batch": batches[0]["num_items_in_batch"]}  # TRL takes that of the first


def padded(rows: Sequence[torch.Tensor], left: bool) -> torch.Tensor:
    """Rows `[n]` of several lengths as one tensor `[B, W]`."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    pads = [(gap, 0) if left else (0, gap) for gap in gaps]
    return torch.stack([F.pad(row, pad, value=PAD_ID) for row, pad in zip(rows, pads, strict=True)])


def _micro_batch(
    model: torch.nn.Module, generator: torch.Generator, range_of_lengths: tuple[int, int], masked: bool
) -> Batch:
    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def pick(levels: tuple[float, ...], *shape: int) -> torch.Tensor:
        return torch.tensor(levels)[integers(0, len(levels), *shape)]

    prompt_lengths, lengths = integers(2, 7, ROWS), integers(*range_of_lengths, ROWS)
    prompt_lengths[-1] = prompt_lengths[0]
    P, T = int(prompt_lengths.max()), int(lengths.max())
    prompt_mask = (torch.arange(P) >= P - prompt_lengths.unsqueeze(1)).long()  # [B, P]
    completion_mask = (torch.arange(T) < lengths.unsqueeze(1)).long()  # [B, T]
    prompt_ids = integers(FIRST_WORD_ID, VOCAB_SIZE, ROWS, P).masked_fill(prompt_mask == 0, PAD_ID)
    prompt_ids[-1] = prompt_ids[0]  # completions of one prompt
    completion_ids = integers(FIRST_WORD_ID, VOCAB_SIZE, ROWS, T).masked_fill(completion_mask == 0, PAD_ID)
    completion_ids[:, 0] = EOS_ID  # one token that several rows share
    current = _log_probs(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask * (0 if masked else 1),
        "advantages": 0.2 + torch.randn(ROWS, generator=generator),
        "old_per_token_logps": current + pick(_DRIFT, ROWS, T),
        "importance_sampling_ratio": pick(_RATIOS, ROWS, 1),
    }


@torch.no_grad()
def _log_probs(model: torch.nn.Module, prompt_ids, prompt_mask, completion_ids, completion_mask) -> torch.Tensor:
    """Log-probs `[B, T]` of the completions, dense."""
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    T = completion_ids.shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]  # [B, T, V]
    return logits.log_softmax(-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
