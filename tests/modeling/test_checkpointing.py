"""Gradient checkpointing with less CPU time: torch's gradients and recomputations, bit for bit."""

import functools
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import nn
from transformers import AutoModelForCausalLM

from trl_fused_grpo.modeling.checkpointing import checkpoint, lean_checkpoints
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config


without_reentrance = functools.partial(torchs.checkpoint, use_reentrant=False)


class Block(nn.Module):
    """A layer with dropout, a constant, saved inputs and saved outputs; counts what runs."""

    def __init__(self, dropout):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.calls = []

    def forward(self, x):
        self.calls.append("first")
        hidden = self.dropout(torch.sigmoid(self.first(x)).exp() * 3)
        self.calls.append("last")
        output = self.last(hidden) + x
        self.calls.append("end")
        return output


def gradients(run, dropout=0.0, cast=False):
    """Of three blocks' parameters and input, and what ran in the last block."""
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(3)]
    x = torch.randn(5, 8, requires_grad=True)
    torch.manual_seed(1)
    hidden = x
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        for block in blocks:
            hidden = run(block, hidden)
    drawn = torch.get_rng_state()
    hidden.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), drawn)  # a recomputation draws nothing from the outer generator
    return [x.grad, *(p.grad for block in blocks for p in block.parameters())], blocks[-1].calls


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_gradients_are_those_without_checkpointing(dropout, cast):
    expected, _ = gradients(lambda block, x: block(x), dropout, cast)
    found, _ = gradients(checkpoint, dropout, cast)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def test_the_recomputation_stops_where_torch_s_does():
    (_, own), (_, torch_s) = gradients(checkpoint), gradients(without_reentrance)
    assert own == torch_s == ["first", "last", "end", "first", "last"]


def test_a_second_backward_computes_once_more():
    block, x = Block(0.0), torch.randn(5, 8, requires_grad=True)
    output = checkpoint(block, x).sum()
    first = torch.autograd.grad(output, x, retain_graph=True)[0]
    second = torch.autograd.grad(output, x)[0]
    assert torch.equal(first, second)
    assert block.calls.count("first") == 3


def test_without_grad_nothing_is_recorded():
    with torch.no_grad():
        assert not checkpoint(Block(0.0), torch.randn(5, 8)).requires_grad


def test_saved_tensors_leave_nothing_to_the_garbage_collector():
    """Thousands of small objects between forward and backward would set off collections of all that there is."""

    def function(x):
        for _ in range(100):
            x = x.sin()  # each saves its input
        return x

    def tracked_after(run):
        gc.collect()
        before = len(gc.get_objects())
        output = run(function, torch.randn(5, requires_grad=True))
        return len(gc.get_objects()) - before, output

    assert tracked_after(checkpoint)[0] < 100
    assert tracked_after(without_reentrance)[0] > 300


def test_another_recomputation_than_the_forward_is_an_error():
    lengths = iter([3, 4])

    def function(x):
        return x[: next(lengths)].exp().sin()

    output = checkpoint(function, torch.randn(5, requires_grad=True)).sum()
    with pytest.raises(torchs.CheckpointError, match="determinism_check"):
        output.backward()


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_a_model_gets_the_same_gradients_and_its_own_checkpoints_back(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(kind)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, VOCAB_SIZE, (2, 7))
    found = []
    for context in (nullcontext(), lean_checkpoints(model)):
        model.zero_grad()
        with context:
            functions = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert all((function is checkpoint) == (len(found) == 2) for function in functions)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert model.model.layers[0]._gradient_checkpointing_func.func is torchs.checkpoint


def test_a_compiled_model_keeps_its_checkpoints():
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with lean_checkpoints(torch.compile(model)):
        assert model.model.layers[0]._gradient_checkpointing_func is not checkpoint


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"use_reentrant": False, "determinism_check": "default"}, None]
)
def test_checkpoints_with_options_of_their_own_stay_torch_s(options):
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    if options is not None:
        model.gradient_checkpointing_enable(options)
    with lean_checkpoints(model):
        for layer in model.model.layers:
            assert getattr(layer, "_gradient_checkpointing_func", None) is not checkpoint
