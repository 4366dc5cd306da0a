"""Kernels in a model's layers: the same gradients; what the user has replaced runs, is counted and told."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from tests.modeling.built import built
from tests.modeling.kernels import called, gradients, kernels_of
from tests.ops.test_triton_kernels import DEVICE, gpu, kernels_run
from trl_fused_grpo.modeling.kernels_in_layers import is_norm, kernels_in_place, kernels_on, read_mlp
from trl_fused_grpo.modeling.layer_kernels import KernelFunction


def test_an_mlp_takes_its_input_by_name_too():
    model = built("llama")
    mlp, hidden = model.model.layers[0].mlp, torch.ones(1, 2, model.config.hidden_size)
    expected = mlp(x=hidden)
    with kernels_on(), kernels_in_place(model):
        assert "forward" in vars(mlp)
        assert torch.equal(mlp(x=hidden), expected)


def test_without_kernels_nothing_stands_in_a_model_s_place():
    model = built("qwen3")
    with kernels_on(False), kernels_in_place(model):
        assert not [module for module in model.modules() if "forward" in vars(module)]
    with kernels_on(), kernels_in_place(model):
        placed = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
        assert [type(forward.function) for forward in placed] == 11 * [KernelFunction]
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_what_has_a_forward_of_its_own_keeps_it():
    model = built("qwen3")
    add_hook_to_module(model.model.norm, ModelHook())
    own = vars(model.model.norm)["forward"]
    with kernels_on(), kernels_in_place(model):
        assert vars(model.model.norm)["forward"] is own


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
