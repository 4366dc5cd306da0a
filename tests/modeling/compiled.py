"""Tiny models to train, and their gradients with compiled parts and without."""

import logging
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.oracle import relative_error
from trl_fused_grpo.modeling import compiled_functions, compiled_parts
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet(monkeypatch):
    """No test finds what another has compiled. The compiler's log, which pytest would keep, takes most of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    compiled_parts._compiled_forward.cache_clear()
    compiled_parts.compiled_in_file.cache_clear()
    monkeypatch.setattr(compiled_parts, "_activations", {})
    compiled_functions.compilations.clear()
    compiled_functions._variants.clear()


def built(kind, checkpoints=True):
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(model_config(kind)).train()
    except (ImportError, ValueError) as missing:
        pytest.skip(str(missing))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gradients(model, is_on, length=7, cast=False, backwards=1):
    """The loss and every gradient of a model."""
    ids = torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with (
        torch.autocast("cpu", torch.bfloat16) if cast else nullcontext(),
        lean_checkpoints(model),
        compiling(model, is_on),
        compiled_forwards(model),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    for last in range(backwards - 1, -1, -1):
        loss.backward(retain_graph=last > 0)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found, expected):
    assert found[1].keys() == expected[1].keys()
    errors = [relative_error(found[1][name], gradient) for name, gradient in expected[1].items()]
    return max(relative_error(found[0], expected[0]), *errors)
