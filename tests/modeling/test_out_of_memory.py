"""A forward that goes on after memory has run out in it: who computes, who is called, who raises what."""

import pytest
import torch
from torch import nn

from trl_fused_grpo.modeling import out_of_memory
from trl_fused_grpo.modeling.out_of_memory import MemoryWatch, SharedOutOfMemoryError


class Layer(nn.Module):
    """Returns hidden states, unless it is told to run out of memory."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.fails, self.computed, self.called = fails, 0, 0
        self.register_forward_pre_hook(lambda *_: setattr(self, "called", self.called + 1))

    def forward(self, hidden_states):
        if self.fails:
            raise torch.OutOfMemoryError("in a layer")
        self.computed += 1
        return hidden_states + 1


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_RETURN_HIDDEN_STATES", set())


def _run(watch, layers):
    def compute():
        hidden = torch.zeros(1, 2, 3)
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    with watch.around_layers():
        return watch.attempt(compute)


def test_every_layer_is_called_after_memory_ran_out_and_none_computes():
    layers = [Layer(), Layer(fails=True), Layer(), Layer()]
    watch = MemoryWatch(lambda condition: condition, layers)
    assert _run(watch, layers).shape == (1, 2, 3)
    assert [(layer.called, layer.computed) for layer in layers] == [(1, 1), (1, 0), (1, 0), (1, 0)]
    assert watch.attempt(lambda: 1) is None
    assert not any("forward" in vars(layer) for layer in layers)
    watch.tell()  # within wrappers that gather weights nothing is raised
    with pytest.raises(SharedOutOfMemoryError, match="in a layer"):
        watch.check()


def test_a_layer_whose_result_is_not_known_raises():
    layers = [Layer(fails=True), Layer()]
    with pytest.raises(torch.OutOfMemoryError, match="in a layer"):
        _run(MemoryWatch(lambda condition: condition, layers), layers)


def test_memory_that_runs_out_before_all_layers_were_called_raises():
    watch = MemoryWatch(lambda condition: condition, [Layer()])

    def compute():
        raise torch.OutOfMemoryError("in the embedding")

    with pytest.raises(torch.OutOfMemoryError, match="in the embedding"):
        watch.attempt(compute)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["elsewhere", "nowhere"])
def test_without_layers_that_wait_all_raise_within_the_forward(elsewhere):
    watch = MemoryWatch(lambda condition: condition or elsewhere)
    assert watch.attempt(lambda: 1) == 1
    if not elsewhere:
        watch.tell()
        return
    with pytest.raises(SharedOutOfMemoryError, match="another process"):
        watch.tell()
