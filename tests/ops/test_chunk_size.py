"""The memory that logits may take, by hand."""

from types import SimpleNamespace

import pytest
import torch

from trl_fused_grpo import LMHead
from trl_fused_grpo.ops.chunk_size import default_group_mib, default_logits_mib, rows_per_chunk


@pytest.mark.parametrize(
    ("mib", "rows"),
    [
        *((0.5, 1), (1, 1), (2, 2), (100, 100), (128, 128), (255, 128), (256, 256), (511, 256), (767, 512)),
        *((1023, 768), (1024, 1024), (2047, 1024), (2048, 2048), (3072, 3072), (4095, 3072), (4096, 4096)),
        *((8191, 4096), (8192, 8192)),
    ],
)
def test_a_chunk_has_the_most_of_the_fast_heights_that_fit(mib, rows):
    assert rows_per_chunk(vocab_size=2**18, itemsize=4, logits_mib=mib) == rows  # a row is one MiB
    assert rows_per_chunk(vocab_size=2**17, itemsize=4, logits_mib=mib / 2) == rows


def on(device, dtype):
    """What a function reads of hidden states `[2048, 512]` on a device."""
    return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, numel=lambda: 2048 * 512)


@pytest.mark.parametrize(
    ("backward", "hidden", "weight", "mib"),
    [
        ("forecast", torch.bfloat16, torch.bfloat16, 256 + 4 + 8),
        ("forecast", torch.bfloat16, torch.float32, 256 + 4),
        ("forecast", torch.float32, torch.bfloat16, 256 + 8),
        ("frozen", torch.bfloat16, torch.bfloat16, 256 + 4),
        ("frozen", torch.float32, torch.float32, 256),
        ("recompute", torch.bfloat16, torch.bfloat16, 256),
        ("no-grad", torch.bfloat16, torch.bfloat16, 256),
    ],
)
def test_logits_on_a_gpu_may_take_what_trl_holds_beside_them(backward, hidden, weight, mib):
    head = LMHead(torch.empty(8192, 512, dtype=weight))  # 8 MiB in 16 bits
    assert default_logits_mib(on("cuda", hidden), head, backward, torch.bfloat16) == mib
    assert default_logits_mib(on("cpu", hidden), head, backward, torch.bfloat16) == 16


def test_a_group_may_take_what_a_layer_keeps():
    assert default_group_mib(hidden_size=1024, tokens=1024) == 48.0
    assert default_group_mib(hidden_size=512, tokens=4096) == 96.0
