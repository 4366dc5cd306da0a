"""Models of other architectures than plain attention, and one whose attention is the user's own."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from trl_fused_grpo.modeling.attention.watch import PACKED_ARGUMENTS
from trl_fused_grpo.parity.tiny import FIRST_WORD_ID, PAD_ID
from trl_fused_grpo.parity.tiny.families import FAMILIES, IMAGE_ID
from trl_fused_grpo.parity.tiny.images import image_inputs, with_images

from .batches import Batch, of_each_rank, padded
from .runs import ACCUMULATION, ARCHITECTURES, ROWS


PROMPTS = ((5, 5, 3), (2, 6, 6))  # tokens of the prompts of each rank; those of one length are the same prompt
COMPLETIONS = ((3, 12, 7), (9, 2, 14))
IMAGES = ((1, 1, 2), (0, 1, 1))  # in the prompts of each rank
# (rank, micro-batch) of which the model sees no completion, or only the first
EMPTY, ALONE = {(1, 2)}, {(1, 0)}
# Columns of a packed row: after the first window rank 1 has longer rows, rank 0 has none
LIMIT = 110


class DeafAttention(LlamaAttention):
    """Attends to the whole row: it does not hear where packed sequences begin."""

    def forward(self, hidden_states, *args, **kwargs):
        deaf_to = (*PACKED_ARGUMENTS, "position_ids")  # which carry the arguments, for models that hand on nothing else
        kwargs = {name: value for name, value in kwargs.items() if name not in deaf_to}
        return super().forward(hidden_states, *args, **kwargs)


def deafen(model: PreTrainedModel) -> None:
    """Give the layers of a Llama model an attention that ignores where packed sequences begin."""
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        layer.self_attn.__class__ = DeafAttention


def limit_width(model: PreTrainedModel) -> None:
    """Have a Llama model say that its layers scale queries by the column where rows are wider than [`LIMIT`]."""
    options = {"attn_temperature_tuning": True, "no_rope_layers": [0], "floor_scale": LIMIT + 1}
    for name, value in options.items():
        setattr(model.config, name, value)


def micro_batches(case: str) -> list[list[Batch]]:
    """Micro-batches `[rank][index]` with sequences of other numbers and lengths on each rank."""
    generator = torch.Generator().manual_seed(0)
    return of_each_rank(lambda rank, index: _micro_batch(case, rank, index, generator))


def _micro_batch(case: str, rank: int, index: int, generator: torch.Generator) -> Batch:
    def words(count: int) -> list[int]:
        return torch.randint(FIRST_WORD_ID, IMAGE_ID, (count,), generator=generator).tolist()

    made: dict[int, list[int]] = {}
    prompts = [made.setdefault(length, words(length)) for length in PROMPTS[rank]]
    name = FAMILIES[ARCHITECTURES[case]].images if case.startswith("images") else None
    name = None if case == "images-on-one" and rank == 1 and index < ACCUMULATION else name
    images = IMAGES[rank]
    if name:
        prompts = with_images(prompts, images, name)
    completions = [words(length) for length in COMPLETIONS[rank]]
    if case == "wide" and index < ACCUMULATION:
        completions = [ids[:9] for ids in completions]
    prompt_ids, completion_ids = (
        padded(list(map(torch.tensor, rows)), left=rows is prompts) for rows in (prompts, completions)
    )
    prompt_mask, completion_mask = ((ids != PAD_ID).long() for ids in (prompt_ids, completion_ids))
    if (rank, index) in EMPTY:
        completion_mask.zero_()
    if (rank, index) in ALONE and case == "deaf":
        completion_mask[1:] = 0
    if rank == 0 and case == "deaf-holes":
        completion_mask[:, 1] = 0
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": 0.2 + torch.randn(ROWS, generator=generator),
    }
    if name:
        ids = torch.cat([prompt_ids, completion_ids], dim=1)
        inputs |= image_inputs(name, images, 2 if images[0] else 1, ids, generator)
    return inputs
