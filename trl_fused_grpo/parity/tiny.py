"""Tiny models and a tokenizer, built from configurations: nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)


VOCAB_SIZE = 1027  # odd, so that no tile of a kernel divides it
PAD_ID, EOS_ID, UNK_ID, FIRST_WORD_ID = 0, 1, 2, 3

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Transformers' 0.02 leaves every distribution uniform, which hides errors in entropy, clipping and quantiles.
    "initializer_range": 0.2,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}


def model_config(kind: str) -> PretrainedConfig:
    """
    Configuration of a tiny causal language model.

    Args:
        kind (`str`):
            `"llama"` (untied head), `"tied"` (Qwen3 with tied embeddings) or `"moe"` (Qwen3 Mixture-of-Experts).

    Returns:
        `PretrainedConfig`:
            Two layers of width 64 over a vocabulary of 1027 tokens.
    """
    if kind == "llama":
        return LlamaConfig(**_SHAPE, tie_word_embeddings=False)
    if kind == "tied":
        return Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True)
    if kind == "moe":
        return Qwen3MoeConfig(
            **_SHAPE,
            tie_word_embeddings=False,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            decoder_sparse_step=1,
        )
    raise ValueError(f"Unknown tiny model {kind!r}: expected 'llama', 'tied' or 'moe'.")


def save_checkpoint(kind: str, folder: Path, dtype: torch.dtype) -> Path:
    """
    Write a tiny model with seeded random weights.

    Args:
        kind (`str`):
            See [`model_config`].
        folder (`Path`):
            Where checkpoints are kept; one sub-folder a kind and dtype, written once.
        dtype (`torch.dtype`):
            Weights are rounded to this dtype, so that a higher precision can load exactly the same values.

    Returns:
        `Path`:
            The checkpoint's folder.
    """
    target = folder / f"{kind}-{str(dtype).removeprefix('torch.')}"
    if not target.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(model_config(kind))
        model.to(dtype).save_pretrained(target)
    return target


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: `"w5"` is token 5."""
    vocab = {"<pad>": PAD_ID, "<eos>": EOS_ID, "<unk>": UNK_ID}
    vocab |= {f"w{i}": i for i in range(FIRST_WORD_ID, VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],  # old TRL passes these on to `generate`
    )
