"""
The inputs of a comparison: tiny models of many families with their tokenizer, PEFT adapters, images, micro-batches and
completions. All are made from configurations and seeds: nothing is downloaded. Tests and benchmarks use the models too.
"""

from .families import EOS_ID, FIRST_WORD_ID, PAD_ID, UNK_ID, VOCAB_SIZE
from .models import model_config, save_checkpoint, tiny_model, tokenizer


__all__ = [
    "EOS_ID",
    "FIRST_WORD_ID",
    "PAD_ID",
    "UNK_ID",
    "VOCAB_SIZE",
    "model_config",
    "save_checkpoint",
    "tiny_model",
    "tokenizer",
]
