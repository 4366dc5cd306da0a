"""What `step.py` trains: models, lengths and options, TRL's defaults unless a case says otherwise."""

from dataclasses import dataclass, field
from typing import Any

import torch
from _rollout import Lengths


DEFAULT_LENGTHS = Lengths()
TINY_LENGTHS = Lengths(prompts=(4, 10), median=20, longest=64)
LONG = Lengths(median=4000, longest=16_384)
ALL_LINEAR: dict[str, Any] = {"lora_alpha": 32, "target_modules": "all-linear"}
VERY_LONG = Lengths(median=20_000, sigma=0.5, longest=32_768)


@dataclass(frozen=True)
class Case:
    """
    One row of the table.

    Args:
        model (`str`): a key of `_trainers.SHAPES`.
        target (`float`, *optional*): the most time relative to stock that a step is meant to take.
        memory (`float`): the same of peak memory.
        lengths ([`Lengths`]): of prompts and completions.
        micro_batch (`int`): sequences in a micro-batch.
        options (`dict`): options of both trainers.
        lora (`bool`): train adapters on all linear layers instead of the weights.
        lora_dropout (`float`): of the adapters; TRL's `ModelConfig` has 0.05.
        dtype (`torch.dtype`): of the weights.
        vllm (`bool`): whether completions count as vLLM's, with its log-probs.
        engine (`str`, *optional*): `"ddp"` or `"fsdp2"`, under torchrun.
        counts_first_of_stock (`bool`):
            Whether stock's first step counts, of which its warm-up is less than 1%. Memory is that of first steps then.
        seed (`int`): of lengths, tokens and noise.
    """

    model: str
    target: float | None = None
    memory: float = 1.0
    lengths: Lengths = DEFAULT_LENGTHS
    micro_batch: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    lora_dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    vllm: bool = True
    engine: str | None = None
    counts_first_of_stock: bool = False
    seed: int = 19  # 76% padding; seed 6 pads 67%


CASES = {
    "0.6b": Case("0.6b", 0.085),
    # Rows of a few tokens: what a step costs the CPU
    "0.6b-short": Case("0.6b", lengths=TINY_LENGTHS),
    "1.7b-lora-short": Case("1.7b", lengths=TINY_LENGTHS, lora=True, dtype=torch.bfloat16),
    "0.6b-no-vllm": Case("0.6b", vllm=False),
    "1.7b": Case("1.7b", 0.090),
    # With seed 19: 4, 29 and 55% padding
    "1.7b-alike": Case("1.7b", 0.33, lengths=Lengths(median=1200, sigma=0.0)),
    "1.7b-quarter": Case("1.7b", 0.26, lengths=Lengths(median=1200, sigma=0.15)),
    "1.7b-half": Case("1.7b", 0.18, lengths=Lengths(median=1200, sigma=0.37)),
    "1.7b-liger-layers": Case("1.7b", options={"use_liger_kernel": True}),
    "1.7b-lora-beta": Case("1.7b", 0.11, 0.90, options={"beta": 0.04}, lora=True),
    "1.7b-lora-bf16": Case("1.7b", 0.09, 0.90, lora=True, dtype=torch.bfloat16),
    "1.7b-lora-dropout": Case("1.7b", lora=True, lora_dropout=0.05, dtype=torch.bfloat16),
    "1.7b-16k": Case("1.7b", 0.11, 0.90, LONG, counts_first_of_stock=True),
    "0.6b-32k": Case("0.6b", 0.18, 0.90, VERY_LONG, micro_batch=1, counts_first_of_stock=True),
    "4b": Case("4b", 0.090),
    "1.7b-ddp": Case("1.7b", 0.10, engine="ddp"),
    "4b-fsdp2": Case("4b", 0.10, engine="fsdp2", counts_first_of_stock=True),
    "8b-fsdp2": Case("8b", engine="fsdp2", counts_first_of_stock=True),
    "8b-lora-fsdp2": Case("8b", lora=True, dtype=torch.bfloat16, engine="fsdp2", counts_first_of_stock=True),
    "tiny": Case("tiny", lengths=TINY_LENGTHS),
    "tiny-lora": Case("tiny", lengths=TINY_LENGTHS, lora=True, options={"beta": 0.04}),
    "tiny-no-vllm": Case("tiny", lengths=TINY_LENGTHS, vllm=False),
    "tiny-ddp": Case("tiny", lengths=TINY_LENGTHS, engine="ddp"),
}


def model_flops(model: Any, rows: list[tuple[int, int]], trains_all: bool) -> float:
    """
    Floating-point operations that a step needs: its matmuls, forward and backward, without padding, recomputation or
    shared prompts.

    Args:
        model (`PreTrainedModel`): with tied embeddings.
        rows (`list[tuple[int, int]]`): tokens of prompt and completion of each sequence.
        trains_all (`bool`): whether weights get gradients; with adapters only activations do.
    """
    config = model.config
    backward = 2 if trains_all else 1
    body = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    head = config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = 0.0
    for prompt, completion in rows:
        length = prompt + completion
        flops += 2 * (1 + backward) * (body * length + head * completion)
        flops += 3 * 2 * attention * length**2  # two matmuls over half of the square, each twice in backward
    return flops
