"""Functions of a model that run in kernels: found by their operations, left where they compute anything else."""

import importlib
import sys
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from tests.modeling.test_compiled_modules import built, nothing_is_compiled_yet  # noqa: F401 - a fixture
from tests.ops.test_triton_kernels import DEVICE, gpu, kernels_run
from trl_fused_grpo.modeling import compiled_modules, shared_casts
from trl_fused_grpo.modeling.as_read import StandIn
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import (
    compiled_forwards,
    compiled_parts,
    compiling,
    why_without_kernel,
)
from trl_fused_grpo.modeling.compiled_parts import CompiledForward
from trl_fused_grpo.modeling.layer_kernels import (
    KernelFunction,
    gated_function,
    gated_kernel,
    has_rotary_kernel,
    norm_function,
    rotary_function,
)
from trl_fused_grpo.modeling.shared_casts import ProjectionForward
from trl_fused_grpo.ops.layer_functions import rotary_formula
from trl_fused_grpo.parity.tiny import VOCAB_SIZE


def kernels_of(model):
    """Names of the classes and functions that have a kernel, each with the number of its places."""
    parts = compiled_parts(model)
    forwards = [f for f in parts.forwards if not (f.needs_compiler or isinstance(f, ProjectionForward))]
    found = [type(forward.module).__name__ for forward in forwards]
    found += [function.place.name for function in parts.functions if not function.needs_compiler]
    return {name: found.count(name) for name in sorted(set(found))}


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


def test_a_function_that_calls_another_than_it_did_runs_as_it_is(monkeypatch):
    model = built("llama")
    file = sys.modules[type(model).__module__]
    [rotary] = [function for function in compiled_parts(model).functions if not function.needs_compiler]
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
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
        assert "forward" in vars(mlp)
        assert torch.equal(mlp(x=hidden), expected)


def test_without_kernels_nothing_stands_in_a_model_s_place():
    model = built("qwen3")
    with compiling(model, is_on=False, kernels=False), compiled_forwards(model):
        assert not [module for module in model.modules() if "forward" in vars(module)]
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
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
def test_what_was_replaced_is_counted_and_told(is_known_before, monkeypatch):
    model, told = built("qwen3"), []
    if is_known_before:
        before = why_without_kernel(model)
        assert {kind: len(reasons) for kind, reasons in before.items()} == {
            "norms": 9,
            "MLPs": 2,
            "rotary embeddings": 1,
        }
        assert not any(reason for reasons in before.values() for reason in reasons)
    replace_parts(model, monkeypatch)
    reasons = {kind: [*filter(None, found)] for kind, found in why_without_kernel(model).items()}
    assert len(reasons["norms"]) == 2
    assert all("has a forward of its own" in reason for reason in reasons["norms"])
    assert reasons["MLPs"] == ["SiLUActivation in Qwen3MLP has hooks or another forward"]
    assert ["apply_rotary_pos_emb" in reason for reason in reasons["rotary embeddings"]] == [True]
    monkeypatch.setattr(compiled_modules.logger, "warning_once", told.append)
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
        pass
    classes = {line.split(" runs as it is, because ")[0] for line in told}
    expected = {"Qwen3RMSNorm", "Qwen3MLP", "Linear"}
    assert classes == (expected | {"apply_rotary_pos_emb"} if is_known_before else expected)


def test_a_norm_that_a_library_has_wrapped_is_not_told(monkeypatch):
    model, told = built("qwen3"), []
    add_hook_to_module(model.model.norm, ModelHook())
    monkeypatch.setattr(compiled_modules.logger, "warning_once", told.append)
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
        assert not isinstance(vars(model.model.norm)["forward"], StandIn)
    assert told == []


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_function_of_torch_that_was_replaced_counts(is_known_before, monkeypatch):
    model, told = built("qwen3"), []
    if is_known_before:
        why_without_kernel(model)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: torch.tanh(x))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: torch._C._nn.linear(*args) * 2)
    for logger in (compiled_modules.logger, shared_casts.logger):
        monkeypatch.setattr(logger, "warning_once", told.append)
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
        placed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert placed == {"Qwen3RMSNorm"}
    assert any("linear" in line and "was replaced" in line for line in told)
    assert all(why_without_kernel(model)["MLPs"])


def test_the_compiler_has_what_is_left():
    model = built("cohere")
    with compiling(model, kernels=True), compiled_forwards(model):
        layer = model.model.layers[0]
        assert isinstance(vars(layer.mlp)["forward"].function, KernelFunction)
        assert isinstance(vars(layer.input_layernorm)["forward"], CompiledForward)
        assert vars(layer.input_layernorm)["forward"].needs_compiler


# With kernels: on a GPU, or in Triton's interpreter

with_kernels = [gpu, kernels_run]


def gradients(model, kernels):
    """The loss and every gradient of a model whose layers are computed again in backward."""
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.zero_grad()
    with lean_checkpoints(model), compiling(model, False, kernels), compiled_forwards(model):
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


class TestCasts:
    pytestmark = with_kernels

    def test_under_autocast_the_error_is_no_larger_than_the_model_s(self):
        model = built("qwen3").to(DEVICE)
        truth = gradients(model, kernels=False)
        with torch.autocast(DEVICE, torch.bfloat16):
            expected, (found, calls) = gradients(model, kernels=False), called(model)
        assert calls["gated"] > 0
        assert (found - truth).norm() <= 1.5 * (expected - truth).norm()
