"""Tiny models in training, which checkpoint their layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_fused_grpo.parity.tiny import model_config


def built(kind, checkpoints=True):
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(model_config(kind)).train()
    except (ImportError, ValueError) as missing:
        pytest.skip(str(missing))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
