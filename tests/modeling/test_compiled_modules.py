"""Norms, MLPs and rotary embeddings, compiled for a forward and its backward: the same numbers, and nothing stays."""

import copy
import pickle
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.modeling.compiled import built, gradients, largest_error, nothing_is_compiled_yet  # noqa: F401 - a fixture
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import compiled_functions, compiled_modules
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling, why_not_compiled
from trl_fused_grpo.modeling.compiled_parts import CompiledActivation, CompiledForward
from trl_fused_grpo.modeling.mlp_activations import read_mlp
from trl_fused_grpo.modeling.module_functions import is_norm


pytestmark = pytest.mark.ends


def kinds_compiled(model):
    return {type(forward.module).__name__ for forward in compiled_modules.compiled_parts(model).forwards}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "lfm2", "gpt-oss", "moe", "cohere"])
def test_gradients_are_those_of_the_model_at_every_length(kind, traced, told):
    model = built(kind)
    expected = [gradients(model, is_on=False, length=length) for length in (7, 12)]
    first = largest_error(gradients(model, is_on=True, length=7), expected[0])
    compilations = dict(compiled_functions.compilations)
    second = largest_error(gradients(model, is_on=True, length=12), expected[1])
    assert max(first, second) < 1e-5
    assert compilations
    assert dict(compiled_functions.compilations) == compilations  # one compilation for all layers and lengths
    assert not told


def test_kernels_of_the_compiler_compute_the_same():
    """And backward may run a second time, as it may in the model."""
    model = built("qwen3")
    expected = gradients(model, is_on=False, backwards=2)
    assert largest_error(gradients(model, is_on=True, backwards=2), expected) < 1e-5
    assert compiled_functions.compilations.total() >= 4


def test_a_cast_layer_is_computed_again_as_it_was(traced, told):
    model = built("qwen3")
    assert largest_error(gradients(model, is_on=True, cast=True), gradients(model, is_on=False, cast=True)) < 1e-2
    assert not told


def test_checkpointed_layers_run_compiled_in_backward_too(traced):
    model = built("llama")
    calls = []
    call = CompiledForward.__call__
    with mock.patch.object(CompiledForward, "__call__", lambda self, *args: calls.append(self) or call(self, *args)):
        ids = torch.arange(3, 10)[None]
        with lean_checkpoints(model), compiling(model), compiled_forwards(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        in_forward = len(calls)
        loss.backward()
    layers, per_layer = len(model.model.layers), 3
    assert in_forward == per_layer * layers + 1  # the last norm is in no layer
    assert len(calls) == in_forward + per_layer * layers


def test_without_grad_there_are_few_more_compilations(traced):
    model = built("llama")
    gradients(model, is_on=True)
    compilations = dict(compiled_functions.compilations)
    with torch.no_grad(), compiling(model), compiled_forwards(model):
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    more = {name: count - compilations[name] for name, count in compiled_functions.compilations.items()}
    assert set(more.values()) <= {1, 2}  # embeddings that must require a gradient do so without grad too


def test_nothing_stays_in_the_model(traced):
    model = built("qwen3")
    file = sys.modules[type(model).__module__]
    rotary, keys = file.apply_rotary_pos_emb, list(model.state_dict())
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    gradients(model, is_on=True)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert file.apply_rotary_pos_emb is rotary
    assert model.model.layers[0]._gradient_checkpointing_func is checkpoint
    assert list(model.state_dict()) == keys
    copy.deepcopy(model)
    pickle.dumps(model.model.layers[0].mlp)


def test_an_error_in_a_forward_leaves_nothing_either(traced):
    model = built("llama")
    with pytest.raises(TypeError), compiling(model), compiled_forwards(model):
        model(input_ids=3)
    assert "forward" not in vars(model.model.norm)


def test_without_a_compiler_the_model_runs_as_it_is(monkeypatch, told):
    def no_compiler(graph, example_inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch_compat, "inductor", no_compiler)
    model = built("llama")
    expected = gradients(model, is_on=False)
    found = gradients(model, is_on=True)
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert len(set(told)) == 3  # norms, MLPs, rotary embeddings
    assert all("torch cannot compile it here" in line and "no C++ compiler" in line for line in told)


def test_the_number_of_compilations_is_bounded(monkeypatch, traced, told):
    monkeypatch.setattr(compiled_functions, "MOST_VARIANTS", 1)
    model = built("llama")
    gradients(model, is_on=True)
    expected = gradients(model, is_on=False, cast=True)
    assert largest_error(gradients(model, is_on=True, cast=True), expected) == 0  # a second kind of inputs
    assert set(compiled_functions.compilations.values()) == {1}
    assert told
    assert all("compiled for 1 kinds already" in line for line in told)


def test_a_compiler_that_is_switched_off_is_told_of(told):
    model = built("llama")
    with torch._dynamo.config.patch(disable=True):
        assert largest_error(gradients(model, is_on=True), gradients(model, is_on=False)) == 0
    assert len(told) == 1
    assert "torch.compile is switched off" in told[0]


def test_a_flattened_embedding_is_no_norm():
    embedding = nn.Embedding(4, 2)
    embedding.weight = nn.Parameter(torch.empty(8))  # as FSDP1 leaves it between forwards
    assert not is_norm(embedding)


@pytest.mark.parametrize("kind", ["gemma3", "phi4"])
def test_between_adapted_projections_the_activation_is_compiled(kind, traced):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(built(kind), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.enable_input_require_grads()
    model = adapted.get_base_model()
    forwards = [f for f in compiled_modules.compiled_parts(model).forwards if f.needs_compiler]
    assert sum(isinstance(forward, CompiledActivation) for forward in forwards) == len(model.model.layers)
    assert largest_error(gradients(model, is_on=True), gradients(model, is_on=False)) < 1e-5
    assert any(name.endswith("_activation") for name in compiled_functions.compilations)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()) + x


def test_only_an_activation_between_projections_is_taken_out_of_an_mlp():
    assert read_mlp(Gated()) is None
    assert read_mlp(built("llama").model.layers[0].mlp).firsts == ("gate_proj", "up_proj")


def test_experts_are_left_alone():
    assert not {name for name in kinds_compiled(built("moe")) if "Expert" in name or "Sparse" in name}


def test_compiled_models_are_left_alone():
    model = built("llama")
    assert "compiled already" in why_not_compiled(torch.compile(model))
    model.model.layers[0].mlp.compile()
    assert "a part of the model is compiled already" in why_not_compiled(model)


def test_torch_s_wrappers_that_checkpoint_are_left_alone(told):
    model = built("llama", checkpoints=False)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert largest_error(gradients(model, is_on=True), gradients(model, is_on=False)) == 0
    assert len(told) == 1
    assert "a wrapper of torch's computes its layers again" in told[0]
