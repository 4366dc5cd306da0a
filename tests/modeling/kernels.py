"""Models whose layers run in kernels: which have one, what runs, and the gradients."""

import importlib
from unittest import mock

import torch

from tests.ops.test_triton_kernels import DEVICE
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.kernels_in_layers import kernels_in_place, kernels_on, parts_with_kernels
from trl_fused_grpo.parity.tiny import VOCAB_SIZE


def kernels_of(model):
    """Names of the classes and functions that have a kernel, each with the number of its places."""
    parts = parts_with_kernels(model)
    found = [type(forward.module).__name__ for forward in parts.forwards]
    found += [function.place.name for function in parts.functions]
    return {name: found.count(name) for name in sorted(set(found))}


def gradients(model, kernels):
    """The loss and every gradient of a model whose layers are computed again in backward."""
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.zero_grad()
    with lean_checkpoints(model), kernels_on(kernels), kernels_in_place(model):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def called(model):
    """How often each kernel runs in a forward and backward."""
    kernels = importlib.import_module("trl_fused_grpo.ops.kernels.layers")
    names = ("rms_norm", "rms_norm_backward", "gated", "gated_backward", "rotary")
    spies = {name: mock.patch.object(kernels, name, mock.Mock(wraps=getattr(kernels, name))) for name in names}
    mocks = {name: spy.start() for name, spy in spies.items()}
    try:
        found = gradients(model, kernels=True)
    finally:
        mock.patch.stopall()
    return found, {name: spy.call_count for name, spy in mocks.items()}
