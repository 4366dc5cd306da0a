"""
The inputs of a comparison, made from configurations and seeds: nothing is downloaded. `families` lists the tiny models,
`models` builds them, their tokenizer and PEFT adapters, `images` and `batches` the data.
"""

from .families import EOS_ID, FIRST_WORD_ID, PAD_ID, VOCAB_SIZE
from .models import model_config, save_checkpoint, tiny_model, tokenizer


__all__ = [
    "EOS_ID",
    "FIRST_WORD_ID",
    "PAD_ID",
    "VOCAB_SIZE",
    "model_config",
    "save_checkpoint",
    "tiny_model",
    "tokenizer",
]
