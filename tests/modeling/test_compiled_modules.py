"""Norms, MLPs and rotary embeddings, compiled for a forward and its backward: the same numbers, and nothing stays."""

import copy
import logging
import pickle
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import compiled_functions, compiled_modules, compiled_parts
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling, why_not_compiled
from trl_fused_grpo.modeling.compiled_parts import CompiledActivation, CompiledForward
from trl_fused_grpo.modeling.mlp_activations import read_mlp
from trl_fused_grpo.modeling.module_functions import is_norm
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config


pytestmark = pytest.mark.ends


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


@pytest.fixture
def traced(monkeypatch):
    """Everything of a compilation but the kernels."""
    monkeypatch.setattr(torch_compat, "inductor", torch._dynamo.lookup_backend("aot_eager"))


@pytest.fixture
def told(monkeypatch):
    """What was logged as a warning."""
    lines = []
    for module in (compiled_functions, compiled_modules):
        monkeypatch.setattr(module.logger, "warning_once", lines.append)
    return lines


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
