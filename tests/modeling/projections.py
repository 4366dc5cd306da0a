"""Projections of one input, run under autocast with shared casts and with separate ones."""

from unittest import mock

import torch
from torch import nn

from tests.ops.test_triton_kernels import DEVICE
from trl_fused_grpo.modeling.shared_casts import projections_in
from trl_fused_grpo.ops.layer_functions import SharedCast


WIDTH = 24


class Projections(nn.Module):
    """Several of one input, and one of what they return."""

    def __init__(self, count, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(count)
        self.parts = [f"part{i}" for i in range(count)]
        for name in self.parts:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "part1", dtype=dtype))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        total = 0
        for name in self.parts:
            total = total + getattr(self, name)(x) ** 2
        return self.last(total.to(x.dtype))


def run(module, times=2, x=None, share=True, **autocast):
    """What the last of several runs returns, and every gradient of it; how many casts were shared in it."""
    forwards = list(projections_in(module)) if share else []
    with mock.patch.object(SharedCast, "apply", side_effect=SharedCast.apply) as shared:
        for _ in range(times):
            module.zero_grad()
            shared.reset_mock()
            leaf = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE) if x is None else x
            leaf = leaf.detach().requires_grad_()
            for forward in forwards:
                forward.module.forward = forward
            with torch.autocast(DEVICE, torch.bfloat16, **autocast):
                result = module(leaf * 1)
            for forward in forwards:
                del forward.module.forward
            (result.float() * result.float().cos().detach()).sum().backward()
    return [result, leaf.grad, *(parameter.grad for parameter in module.parameters())], shared
