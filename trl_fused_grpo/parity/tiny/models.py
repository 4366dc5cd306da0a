"""Tiny models with seeded random weights, their tokenizer, and PEFT adapters by the name that a case gives them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import is_peft_available

from .families import EOS_ID, FAMILIES, FIRST_WORD_ID, PAD_ID, UNK_ID, VARIANTS, VOCAB_SIZE, Family


ATTENTION: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
# The class of the configuration, and its options
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("LoraConfig", ATTENTION),
    "head": ("LoraConfig", {**ATTENTION, "target_modules": ["q_proj", "v_proj", "lm_head"]}),
    # A trained copy of the output projection
    "head-copy": ("LoraConfig", {**ATTENTION, "modules_to_save": ["lm_head"]}),
}


def adapter_config(name: str) -> Any:
    """
    The configuration of an adapter, by its name in `ADAPTERS`.

    Raises:
        `ImportError`: when PEFT is not installed or is too old for the adapter.
    """
    if not is_peft_available():
        raise ImportError("peft is not installed")
    import peft

    kind, options = ADAPTERS[name]
    missing = options.keys() - {option.name for option in fields(getattr(peft, kind))}
    if missing:
        raise ImportError(f"this PEFT has no `{missing.pop()}`")
    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)


def _family(kind: str) -> Family:
    known = {**FAMILIES, **VARIANTS}
    if kind not in known:
        raise ValueError(f"Unknown tiny model {kind!r}: expected one of {', '.join(known)}.")
    return known[kind]


def model_config(kind: str) -> PretrainedConfig:
    """
    Configuration of a tiny causal language model: two layers of width 64 over a vocabulary of 1027 tokens.

    Args:
        kind (`str`): a name in [`families.FAMILIES`] or [`families.VARIANTS`].

    Raises:
        `ValueError`: for a name that is in neither.
        `ImportError`: when the installed transformers lacks the family.
    """
    return _family(kind).tiny()


def tiny_model(kind: str) -> PreTrainedModel:
    """
    A tiny model with seeded random weights, always the same, with a language-modeling head, in float32.

    Args:
        kind (`str`): see [`model_config`].
    """
    config = model_config(kind)
    auto: Any = AutoModelForCausalLM
    if config.get_text_config() is not config:
        auto = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config)
        for end, value in _family(kind).weights.items():
            for name, parameter in model.named_parameters():
                if name.endswith(end):
                    parameter.fill_(value)
    return model


def save_checkpoint(kind: str, folder: Path, dtype: torch.dtype) -> Path:
    """
    Write a tiny model with seeded random weights, and return the checkpoint's folder.

    Args:
        kind (`str`): see [`model_config`].
        folder (`Path`): where checkpoints are kept. Each kind and dtype has a sub-folder, which is written once.
        dtype (`torch.dtype`): weights are rounded to it, so that a higher precision can load exactly the same values.
    """
    target = folder / f"{kind}-{str(dtype).removeprefix('torch.')}"
    if not target.exists():
        tiny_model(kind).to(dtype).save_pretrained(target)
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
