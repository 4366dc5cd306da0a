"""A kernel that was compiled for some arguments is launched for those of the same kind alone."""

import random

import pytest
import torch

from tests.ops.test_triton_kernels import DEVICE, gpu, kernels_run


pytest.importorskip("triton")

from trl_fused_grpo.ops.kernels import layers
from trl_fused_grpo.ops.layer_functions import gated_formula


pytestmark = [gpu, kernels_run]


def test_launches_of_every_kind_of_arguments_in_any_order():
    counts = (1, 2, 15, 16, 17, 48, 2048, 2049, 4096)
    calls = [
        (count, offset, dtype)
        for count in counts
        for offset in (0, 1, 8, 16)  # elements: addresses that are multiples of 16 bytes, and others
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    random.Random(0).shuffle(calls)
    for count, offset, dtype in calls * 2:
        gate, up = torch.randn(2, count + offset, device=DEVICE).to(dtype)[:, offset:]
        y = torch.full((count + 2 * offset + 1,), 7.0, device=DEVICE, dtype=dtype)
        layers.gated(gate, up, y[offset : offset + count], 0)
        assert torch.allclose(y[offset : offset + count], gated_formula(gate, up, "silu"), rtol=2e-2, atol=2e-2)
        assert (y[:offset] == 7).all() and (y[offset + count :] == 7).all()


def test_strides_of_every_kind():
    for heads, length, width in ((1, 1, 2), (2, 3, 16), (3, 16, 8), (4, 17, 32), (1, 5, 64)) * 2:
        q, k = torch.randn(2, 2, length, heads, width, device=DEVICE).transpose(2, 3)
        cos, sin = torch.randn(2, 2, length, width, device=DEVICE)
        for first, second in ((q, k), (q.contiguous(), k), (q[:1], k[:1])):
            of = first.shape[0]
            outputs = torch.empty_like(first), torch.empty_like(second)
            layers.rotary(first, second, cos[:of], sin[:of], *outputs, False, False)
            for x, y in zip((first, second), outputs, strict=True):
                half = width // 2
                turned = torch.cat((-x[..., half:], x[..., :half]), -1)
                expected = x * cos[:of, None] + turned * sin[:of, None]
                assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
