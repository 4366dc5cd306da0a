"""Kernels in a model's layers: the same gradients; what the user has replaced runs, is counted and told."""

import sys
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from tests.modeling.built import built
from tests.modeling.kernels import called, gradients, kernels_of
from tests.ops.test_triton_kernels import DEVICE, gpu, kernels_run
from trl_fused_grpo.modeling import compiled_modules, shared_casts
from trl_fused_grpo.modeling.as_read import StandIn
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiled_parts, kernels_on
from trl_fused_grpo.modeling.layer_kernels import KernelFunction
from trl_fused_grpo.modeling.mlp_activations import read_mlp
from trl_fused_grpo.modeling.module_functions import is_norm
from trl_fused_grpo.modeling.shared_casts import ProjectionForward


def test_a_function_that_calls_another_than_it_did_runs_as_it_is(monkeypatch):
    model = built("llama")
    file = sys.modules[type(model).__module__]
    [rotary] = compiled_parts(model).functions
    assert rotary.change() is None
    monkeypatch.setattr(file, "rotate_half", lambda x: x)
    assert "was replaced" in rotary.change()


def test_norms_in_a_layer_of_the_user_s_have_no_kernel():
    """Who calls a norm may change its input in place: torch's operations keep a copy of 16 bits, a kernel does not."""

    class Layer(type(built("llama").model.layers[0])):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs)

    model = built("llama")
    model.model.layers[0].__class__ = Layer
    assert kernels_of(model)["LlamaRMSNorm"] == 3
    model = built("llama")
    model.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    assert kernels_of(model)["LlamaRMSNorm"] == 3


def test_an_mlp_takes_its_input_by_name_too():
    model = built("llama")
    mlp, hidden = model.model.layers[0].mlp, torch.ones(1, 2, model.config.hidden_size)
    expected = mlp(x=hidden)
    with kernels_on(), compiled_forwards(model):
        assert "forward" in vars(mlp)
        assert torch.equal(mlp(x=hidden), expected)


def test_without_kernels_nothing_stands_in_a_model_s_place():
    model = built("qwen3")
    with kernels_on(False), compiled_forwards(model):
        assert not [module for module in model.modules() if "forward" in vars(module)]
    with kernels_on(), compiled_forwards(model):
        placed = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
        projections = [forward for forward in placed if isinstance(forward, ProjectionForward)]
        assert {type(forward.function) for forward in placed if forward not in projections} == {KernelFunction}
        assert (len(placed) - len(projections), len(projections)) == (11, 14)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def replace_parts(model, monkeypatch):
    """A norm's forward, a hook in an MLP, what an MLP calls, the rotary function; and a norm as a library does it."""
    first, second = model.model.layers
    first.input_layernorm.forward = lambda hidden: 2 * hidden
    first.mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
    second.mlp.up_proj.forward = lambda hidden: 2 * hidden
    add_hook_to_module(model.model.norm, ModelHook())
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, *angles: (q, k))


@pytest.mark.parametrize("is_known_before", [True, False])
def test_what_was_replaced_is_told(is_known_before, monkeypatch):
    model, told = built("qwen3"), []
    if is_known_before:
        kernels_of(model)
    replace_parts(model, monkeypatch)
    monkeypatch.setattr(compiled_modules.logger, "warning_once", told.append)
    with kernels_on(), compiled_forwards(model):
        pass
    classes = {line.split(" runs as it is, because ")[0] for line in told}
    expected = {"Qwen3RMSNorm", "Qwen3MLP", "Linear"}
    assert classes == (expected | {"apply_rotary_pos_emb"} if is_known_before else expected)


def test_a_norm_that_a_library_has_wrapped_is_not_told(monkeypatch):
    model, told = built("qwen3"), []
    add_hook_to_module(model.model.norm, ModelHook())
    monkeypatch.setattr(compiled_modules.logger, "warning_once", told.append)
    with kernels_on(), compiled_forwards(model):
        assert not isinstance(vars(model.model.norm)["forward"], StandIn)
    assert told == []


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_function_of_torch_that_was_replaced_counts(is_known_before, monkeypatch):
    model, told = built("qwen3"), []
    if is_known_before:
        kernels_of(model)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: torch.tanh(x))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: torch._C._nn.linear(*args) * 2)
    for logger in (compiled_modules.logger, shared_casts.logger):
        monkeypatch.setattr(logger, "warning_once", told.append)
    with kernels_on(), compiled_forwards(model):
        placed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert placed == {"Qwen3RMSNorm"}
    assert any("linear" in line and "was replaced" in line for line in told)


def change_constant(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def add_bias(model):
    model.model.layers[0].mlp.gate_proj.bias = nn.Parameter(torch.ones(model.config.intermediate_size))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()) + x


def test_only_an_activation_between_projections_is_taken_out_of_an_mlp():
    assert read_mlp(Gated()) is None
    assert read_mlp(built("llama").model.layers[0].mlp).firsts == ("gate_proj", "up_proj")


def test_a_flattened_embedding_is_no_norm():
    embedding = nn.Embedding(4, 2)
    embedding.weight = nn.Parameter(torch.empty(8))  # as FSDP1 leaves it between forwards
    assert not is_norm(embedding)


def test_experts_are_left_alone():
    assert not [name for name in kernels_of(built("moe")) if "Expert" in name or "Sparse" in name]


# With kernels: on a GPU, or in Triton's interpreter
with_kernels = [gpu, kernels_run]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "lfm2", "moe"])
class TestInAModel:
    pytestmark = with_kernels

    def test_gradients_are_the_model_s(self, kind):
        model = built(kind).to(DEVICE)
        expected = gradients(model, kernels=False)
        found, calls = called(model)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert calls["rms_norm"] > calls["rms_norm_backward"] > 0  # each layer twice
        assert calls["rotary"] > 0

    def test_what_the_user_has_put_there_runs(self, kind):
        model = built(kind).to(DEVICE)
        file = sys.modules[type(model).__module__]
        layer = model.model.layers[-1]
        norms = [module for module in layer.modules() if type(module).__name__.endswith("RMSNorm")]
        norms[0].forward = lambda hidden: hidden * 2
        with mock.patch.object(file, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * 3, k)):
            expected = gradients(model, kernels=False)
            found, calls = called(model)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert calls["rotary"] == 0


class TestWhatHasChanged:
    pytestmark = with_kernels

    @pytest.mark.parametrize("change", [change_constant, add_bias])
    def test_since_a_forward_counts_in_the_next(self, change):
        model = built("llama").to(DEVICE)
        gradients(model, kernels=True)
        change(model)
        model.to(DEVICE)
        expected = gradients(model, kernels=False)
        assert (gradients(model, kernels=True) - expected).norm() <= 1e-5 * expected.norm()


class TestCasts:
    pytestmark = with_kernels

    def test_under_autocast_the_error_is_no_larger_than_the_model_s(self):
        model = built("qwen3").to(DEVICE)
        truth = gradients(model, kernels=False)
        with torch.autocast(DEVICE, torch.bfloat16):
            expected, (found, calls) = gradients(model, kernels=False), called(model)
        assert calls["gated"] > 0
        assert (found - truth).norm() <= 1.5 * (expected - truth).norm()
