"""How many rows of logits are in memory at a time."""

import torch
from torch import Tensor

from .lm_head import LMHead


# Rows of a chunk whose GEMMs leave few of the GPU's multiprocessors idle at their end, measured on one H200 at hidden
# sizes 1024 and 4096 (benchmarks/NOTES.md). Other numbers take up to a sixth longer for the same work. Larger chunks
# are multiples of the first number; smaller ones take as many rows as fit
_PREFERRED_ROWS = (4096, 3072, 2048, 1024, 768, 512, 256, 128)


def rows_per_chunk(vocab_size: int, itemsize: int, logits_mib: float) -> int:
    """Return how many rows of logits fit into `logits_mib` MiB, rounded down to a number at which GEMMs are fast."""
    rows = max(1, int(logits_mib * 2**20) // (vocab_size * itemsize))
    return rows // _PREFERRED_ROWS[0] * _PREFERRED_ROWS[0] or next((n for n in _PREFERRED_ROWS if n <= rows), rows)


def default_logits_mib(hidden: Tensor, head: LMHead, backward: str, compute_dtype: torch.dtype) -> float:
    """
    Return the size of the chunk of logits, in MiB, at which peak memory stays below that of TRL's fused head.

    Outside CUDA a chunk should stay in cache. On CUDA the logits may take the 256 MiB of TRL's own tile of logits; the
    memory that the cast of the weight's gradient takes later, when the logits are freed; and that of the float32
    gradient of the hidden states, which only TRL holds. The copy of float32 weights that autocast makes comes on top,
    up to 0.18 of TRL's peak.
    """
    if hidden.device.type != "cuda":
        return 16
    size = 256 * 2**20
    if backward in ("frozen", "forecast") and hidden.dtype == compute_dtype:
        size += 4 * hidden.numel()
    if backward == "forecast" and head.weight.dtype == compute_dtype:
        size += head.weight.numel() * head.weight.itemsize
    return size / 2**20


# What a decoder layer keeps until its own backward, at least, for each number of its input: norms, the projections of
# attention, and an MLP of two and a half times the width or more, in bfloat16
_LAYER_BYTES = 48


def default_group_mib(hidden_size: int, tokens: int) -> float:
    """
    Return the memory, in MiB, that the logits of one sequence may take so that they are gone before the peak.

    That is what one decoder layer keeps for its backward, which comes later. Layers that are computed again in
    backward keep that much one after the other, all others together.
    """
    return _LAYER_BYTES * hidden_size * tokens / 2**20
