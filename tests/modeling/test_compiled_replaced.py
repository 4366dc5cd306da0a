"""What the user has put into a model, or looks at, counts beside compiled parts as it does without them."""

import copy
import pickle
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.modeling.compiled import built, gradients, largest_error, nothing_is_compiled_yet  # noqa: F401 - a fixture
from trl_fused_grpo.modeling import compiled_functions
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling
from trl_fused_grpo.modeling.compiled_parts import CompiledActivation, CompiledForward


pytestmark = pytest.mark.ends


def test_a_hook_on_a_norm_runs_and_one_in_an_mlp_keeps_its_projections(traced):
    model = built("llama", checkpoints=False)
    expected = gradients(model, is_on=False)
    seen = []
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    with compiling(model), compiled_forwards(model):
        forwards = [vars(layer.mlp)["forward"] for layer in model.model.layers]
        assert [type(forward) for forward in forwards[:2]] == [CompiledActivation, CompiledForward]
    assert largest_error(gradients(model, is_on=True), expected) < 1e-5
    assert sorted(seen) == ["norm", "up"]


def test_forwards_of_the_users_stay(traced):
    model = built("llama")
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    mlp.forward = lambda hidden: hidden * 2
    file = sys.modules[type(model).__module__]
    own = mock.Mock(side_effect=lambda q, k, cos, sin: (q, k))
    with (
        mock.patch.object(file, "apply_rotary_pos_emb", own),
        mock.patch.object(type(norm), "forward", lambda self, hidden: hidden * 3),
    ):
        expected = gradients(model, is_on=False)
        own.reset_mock()
        assert largest_error(gradients(model, is_on=True), expected) < 1e-5
        assert own.call_count == 2 * len(model.model.layers)
        assert "LlamaRMSNorm" not in compiled_functions.compilations


def test_a_norm_whose_constant_has_changed_runs_as_it_is(traced):
    model = built("llama")
    gradients(model, is_on=True)
    model.model.norm.variance_epsilon = 0.5
    expected = gradients(model, is_on=False)
    assert largest_error(gradients(model, is_on=True), expected) < 1e-5


def drop_everything(model):
    model.transformer.h[0].mlp.dropout.p = 1.0


def add_bias(model):
    model.model.layers[0].mlp.gate_proj.bias = nn.Parameter(torch.ones(model.config.intermediate_size))


@pytest.mark.parametrize(("kind", "change"), [("gpt2", drop_everything), ("llama", add_bias)])
def test_an_mlp_of_which_a_part_has_changed_runs_as_it_is(kind, change, traced):
    model = built(kind, checkpoints=False)
    gradients(model, is_on=True)
    change(model)
    expected = gradients(model, is_on=False)
    assert largest_error(gradients(model, is_on=True), expected) < 1e-5


def doubled(method):
    return lambda self, x: 2 * method(self, x)


@pytest.mark.parametrize("is_trained_before", [True, False])
def test_a_method_of_a_class_that_the_user_replaces_counts(is_trained_before, traced, monkeypatch):
    """In a model that was trained before, and in another one: what is compiled is shared by all models."""
    model = built("gemma3", checkpoints=False)
    gradients(model, is_on=True)
    norm, activation = type(model.model.norm), type(model.model.layers[0].mlp.act_fn)
    monkeypatch.setattr(norm, "_norm", doubled(norm._norm))
    monkeypatch.setattr(activation, "forward", doubled(activation.forward))
    model = model if is_trained_before else built("gemma3", checkpoints=False)
    expected = gradients(model, is_on=False)
    assert largest_error(gradients(model, is_on=True), expected) < 1e-5


class Projection(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Recording(nn.Module):
    """An MLP of the user's."""

    def __init__(self, mlp):
        super().__init__()
        self.first, self.last, self.seen = Projection(mlp.up_proj.weight), Projection(mlp.down_proj.weight), []

    def forward(self, x):
        self.seen.append(type(x))
        return self.last(self.first(x).relu())


def test_a_forward_of_the_users_sees_tensors_alone(traced):
    model = built("llama", checkpoints=False)
    own = model.model.layers[0].mlp = Recording(model.model.layers[0].mlp)
    gradients(model, is_on=True)
    assert own.seen == [torch.Tensor]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_copy_that_is_made_within_a_forward_is_a_plain_model(checkpoints, traced):
    model, copies = built("llama", checkpoints), []

    def copy_it(*_):
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model.model.layers[0].mlp)))

    hook = model.model.layers[1].register_forward_pre_hook(copy_it)
    expected = gradients(model, is_on=True)
    hook.remove()
    whole, mlp = copies[:2]
    assert not [part for part in (*whole.modules(), mlp) if isinstance(vars(part).get("forward"), CompiledForward)]
    assert largest_error(gradients(whole, is_on=False), expected) < 1e-5
    x = torch.ones(1, 3, model.config.hidden_size)
    assert torch.equal(mlp(x), model.model.layers[0].mlp(x))


def test_a_mode_that_sees_every_operation_sees_them_all(traced, told):
    """The compiler does not work under it. It may begin with the first step, or end before backward."""
    model = built("llama")
    with FlopCounterMode(display=False) as expected:
        gradients(model, is_on=False)
    for _ in range(2):
        with FlopCounterMode(display=False) as found:
            gradients(model, is_on=True)
        assert found.get_total_flops() == expected.get_total_flops()
        gradients(model, is_on=True)
    with FlopCounterMode(display=False), lean_checkpoints(model), compiling(model), compiled_forwards(model):
        loss = model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.sum()
    loss.backward()
    assert not told
