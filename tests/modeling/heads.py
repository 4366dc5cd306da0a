"""What tests put into a model around its head: low-rank adapters, and a layer with a quantized weight."""

import pytest
import torch
from torch import nn


peft = pytest.importorskip("peft")


def lora(*targets, **options):
    return peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), task_type="CAUSAL_LM", **options)


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored in 8 bits."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight * self.scale).to(x.dtype).T
