"""Functions of a model that run in kernels: found by their operations, left where they compute anything else."""

import pytest
import torch
from torch import nn

from tests.modeling.built import built
from tests.modeling.kernels import kernels_of
from trl_fused_grpo.modeling.layer_kernels import (
    gated_function,
    gated_kernel,
    has_rotary_kernel,
    norm_function,
    rotary_function,
)
from trl_fused_grpo.ops.layer_functions import rotary_formula


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3", {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "apply_rotary_pos_emb": 1}),
        ("llama", {"LlamaRMSNorm": 5, "LlamaMLP": 2, "apply_rotary_pos_emb": 1}),
        ("gemma3", {"Gemma3RMSNorm": 13, "Gemma3MLP": 2, "apply_rotary_pos_emb": 1}),
        ("lfm2", {"Lfm2RMSNorm": 7, "Lfm2MLP": 2, "apply_rotary_pos_emb": 1}),
        ("moe", {"Qwen3MoeRMSNorm": 9, "apply_rotary_pos_emb": 1}),
        ("cohere", {"CohereMLP": 2}),  # its norms subtract the mean, its pairs lie side by side
        ("gpt2", {}),
    ],
)
def test_norms_mlps_and_rotary_embeddings_are_known_by_what_they_compute(kind, expected):
    model = built(kind)
    assert kernels_of(model) == expected


def norm(x, weight, power=2, eps=1e-6):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(power).mean(-1, keepdim=True) + eps)).to(x.dtype)


def test_a_norm_counts_however_it_is_written():
    def written_otherwise(x, weight):
        dtype, x = x.dtype, x.to(torch.float32)
        mean = 1e-6 + torch.mean(torch.pow(x, 2), dim=-1, keepdim=True)
        return torch.mul((torch.pow(mean, -0.5) * x).to(dtype), weight)

    assert norm_function("norm", norm) is not None
    assert norm_function("norm", written_otherwise) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda x, weight: norm(x, weight, power=4),
        lambda x, weight: norm(x, weight).clamp(-7, 7),
        lambda x, weight: norm(x, weight) + x,
        lambda x, weight: norm(x - x.mean(-1, keepdim=True), weight),
        lambda x, weight: norm(x, 1 + weight),  # rounds the sum
        lambda x, weight: norm(x, weight) if x.sum() > 0 else x,
    ],
)
def test_anything_else_is_no_norm(other):
    assert norm_function("norm", other) is None


def test_gates_are_told_from_what_they_gate():
    function = nn.functional.silu
    gate, up = torch.randn(2, 1, 4, 8)
    assert gated_function("mlp", lambda gate, up: function(gate) * up) is not None
    assert gated_function("mlp", lambda up, gate: up * function(gate)) is not None
    assert gated_function("mlp", lambda gate, up: function(gate) + up) is None
    assert gated_function("mlp", lambda gate, up: function(gate * up)) is None
    assert gated_function("mlp", lambda gate, up: nn.functional.gelu(gate) * up) is None  # that of the error function
    assert gated_kernel(lambda gate, up: function(gate) * up, (gate, up.bfloat16())) is None


def test_rotations_of_other_pairs_have_no_kernel():
    def of_neighbours(q, k, cos, sin):
        def turned(x):
            return x * cos.unsqueeze(1) + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin.unsqueeze(1)

        return turned(q), turned(k)

    assert has_rotary_kernel(rotary_formula)
    assert not has_rotary_kernel(of_neighbours)
    assert not has_rotary_kernel(lambda q, k, cos, sin: rotary_formula(k, q, cos, sin))


class Detached(torch.autograd.Function):
    """`silu`, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return nn.functional.silu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def with_fixed_scale(x, weight):
    wide = x.float()
    with torch.no_grad():
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def of_changed_input(x, weight):
    x[..., 0] = 0
    return norm(x, weight)


def test_the_same_operations_with_other_gradients_or_effects_have_no_kernel():
    assert norm_function("norm", with_fixed_scale) is None
    assert norm_function("norm", of_changed_input) is None
    assert gated_function("mlp", lambda gate, up: Detached.apply(gate) * up) is None


def shapes_of(*shapes):
    return tuple(torch.ones(shape) for shape in shapes)


def rotary():
    return rotary_function("rotary", rotary_formula)


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda: norm_function("norm", norm), shapes_of((2, 3, 8), (1,))),
        (lambda: norm_function("norm", norm), shapes_of((2, 3, 1), (8,))),
        (lambda: gated_function("mlp", lambda g, u: nn.functional.silu(g) * u), shapes_of((2, 3, 8), (2, 1, 8))),
        (rotary, shapes_of((2, 3, 5, 8), (2, 3, 5, 8), (2, 1, 8), (2, 1, 8))),
        (rotary, shapes_of((1, 3, 5, 8), (1, 3, 5, 8), (2, 5, 8), (2, 5, 8))),
        (rotary, shapes_of((2, 3, 5, 8), (1, 3, 5, 8), (2, 5, 8), (2, 5, 8))),
        (lambda: gated_function("mlp", lambda g, u: nn.functional.silu(g) * u), shapes_of((2, 3, 0), (2, 3, 0))),
    ],
)
def test_what_is_broadcast_or_empty_is_left_to_torch(make, tensors):
    assert make()(tensors, lambda: "as it is") == "as it is"


def test_angles_that_are_trained_are_left_to_torch_whatever_came_before():
    function = rotary()
    tensors = shapes_of((2, 3, 5, 8), (2, 3, 5, 8), (2, 5, 8), (2, 5, 8))
    assert has_rotary_kernel(rotary_formula)
    function._found[tuple((tensor.dtype, 8) for tensor in tensors)] = lambda *_: "kernel"
    assert function(tensors, lambda: "as it is") == "kernel"
    tensors[2].requires_grad_()
    assert function(tensors, lambda: "as it is") == "as it is"
