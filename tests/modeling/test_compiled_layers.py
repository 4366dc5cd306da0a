"""Decoder layers that torch compiles: the same gradients at every length, and nothing stays in the model."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn

from tests.compiler import traced_layers
from tests.modeling.built import built
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention.varlen import (
    SharedPrefixKV,
    cu_seqlens_arguments,
    traced_attention,
    varlen_attention,
)
from trl_fused_grpo.modeling.layers import compiled as compiled_layers
from trl_fused_grpo.modeling.layers.compiled import layers_to_compile


def largest_error(found, expected):
    assert found[1].keys() == expected[1].keys()
    errors = [relative_error(found[1][name], gradient) for name, gradient in expected[1].items()]
    return max(relative_error(found[0], expected[0]), *errors)


def pair(folder, kind="llama", checkpoints=True, **options):
    """A trainer that compiles and one that does not, of the same weights."""
    trainers = [make_trainer(folder, kind=kind, fused_compile=is_on, **options) for is_on in (True, False)]
    for trainer in trainers:
        trainer.model.train()
        if checkpoints:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainers


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpoints", [True, False], ids=["checkpointed", "everything-kept"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi4", "cohere"])
def test_gradients_are_those_of_the_model_at_every_length(tmp_path, kind, checkpoints):
    trainer, plain = pair(tmp_path, kind, checkpoints)
    with traced_layers() as counts:
        for rows, length in ((4, 8), (4, 13), (3, 30)):
            inputs = make_inputs(rows, length)
            assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5
            counts["graphs of the first"] = counts["graphs of the first"] or counts["graphs"]
    assert counts["eager"] == 0
    assert 0 < counts["graphs"] == counts["graphs of the first"]  # one code for all layers and lengths


def test_one_code_serves_rows_of_every_composition(tmp_path):
    """How many sequences there are, and how many share a prompt, or none."""
    trainer, _ = pair(tmp_path)
    with traced_layers() as counts:
        for rows, length, group in ((4, 8, 2), (6, 12, 3), (4, 13, 4), (3, 30, 3), (5, 7, 5), (15, 16, 5), (2, 20, 1)):
            inputs = make_inputs(rows, length)
            first = torch.arange(rows) // group * group
            inputs |= {name: inputs[name][first] for name in ("prompt_ids", "prompt_mask")}
            loss_and_gradients(trainer, inputs)
    assert counts["graphs"] == 1 and counts["eager"] == 0


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "all-weights"])
def test_a_training_has_one_code_with_gradients_and_one_without(tmp_path, adapters):
    """Without: of the check of the first step. Checkpointing has the first layer's input require gradients."""
    peft_config = pytest.importorskip("peft").LoraConfig(task_type="CAUSAL_LM") if adapters else None
    options = {"gradient_checkpointing": True, "max_steps": 2, "peft_config": peft_config}
    trainer = make_trainer(tmp_path, fused_compile=True, **options)
    with traced_layers() as counts:
        trainer.train()
    assert counts["graphs"] == 2 and counts["eager"] == 0


@pytest.mark.nightly
def test_kernels_of_the_compiler_compute_the_same(tmp_path):
    trainer, plain = pair(tmp_path, "qwen3")
    inputs = make_inputs()
    with traced_layers("inductor") as counts:
        assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5
    assert counts["graphs"] > 0


@pytest.mark.parametrize("kind", [pytest.param("lfm2", marks=pytest.mark.nightly), "moe"])
def test_layers_that_torch_cannot_compile_run_as_they_are(tmp_path, kind):
    """Of LFM2 those with a convolution, which runs on rows of its own."""
    trainer, plain = pair(tmp_path, kind)
    inputs = make_inputs()
    with traced_layers():
        assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5


def test_layers_that_write_to_their_weights_run_as_they_are(tmp_path):
    """Gemma 3n's clamp in their forward; a compiled layer that checkpoints then finds other weights in backward."""
    trainer, plain = pair(tmp_path, "gemma3n")
    inputs = make_inputs()
    with traced_layers() as counts:
        assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5
    assert "graphs" not in counts
    assert layers_to_compile(trainer.model)[1] == "Gemma3nTextAltUp writes to its weights in its forward"


@pytest.mark.nightly
def test_adapters_are_compiled_with_their_layers(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    trainer, plain = pair(tmp_path, peft_config=config)
    plain.model.load_state_dict(trainer.model.state_dict())
    inputs = make_inputs()
    with traced_layers() as counts:
        assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5
    assert counts["LlamaDecoderLayer"] > 0 == counts["eager"]


@pytest.mark.nightly
def test_a_checkpointed_layer_keeps_less_for_backward(tmp_path):
    kept = []

    def keep(tensor):
        kept[-1] += tensor.numel()
        return tensor

    for checkpoints in (True, False):
        trainer, _ = pair(tmp_path, checkpoints=checkpoints)
        kept.append(0)
        with traced_layers("inductor"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_and_gradients(trainer, make_inputs(rows=8, length=60))
    assert kept[0] < 0.7 * kept[1]


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_layers_with_dropout_are_compiled_within_checkpointing(tmp_path, is_reentrant):
    """Their own backward would compute them again and drop other numbers; torch's checkpointing drops the same."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
    trainer = make_trainer(tmp_path, fused_compile=True, peft_config=peft.LoraConfig("CAUSAL_LM", **options))
    trainer.model.train().gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    with traced_layers("inductor") as counts:
        loss_and_gradients(trainer, make_inputs())
        found = counts["graphs"]
        for rows, length in ((3, 30), (5, 9)):
            loss_and_gradients(trainer, make_inputs(rows, length))
    assert counts["eager"] == 0 and counts["graphs"] == found


def test_nothing_stays_in_the_model(tmp_path):
    trainer, _ = pair(tmp_path)
    model = trainer.model
    checkpoint, keys = model.model.layers[0]._gradient_checkpointing_func, list(model.state_dict())
    with traced_layers():
        loss_and_gradients(trainer, make_inputs())
    assert not [layer for layer in model.model.layers if "forward" in vars(layer)]
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.model.layers[0]._gradient_checkpointing_func is checkpoint
    assert list(model.state_dict()) == keys
    copy.deepcopy(model.model.layers)
    pickle.dumps(model.model.layers[0].mlp)


def test_without_a_compiler_the_layers_run_as_they_are_which_is_told_once(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(compiled_layers.logger, "warning_once", told.append)
    trainer, plain = pair(tmp_path)
    inputs = make_inputs()
    expected = loss_and_gradients(plain, inputs)

    def no_compiler(graph, example_inputs):
        raise RuntimeError("no C++ compiler")

    with traced_layers() as counts, mock.patch.object(torch_compat, "inductor", no_compiler):
        found = loss_and_gradients(trainer, inputs)
        assert largest_error(found, expected) < 1e-6
        assert counts["eager"] > len(trainer.model.model.layers)  # checkpointed, and so computed again
        assert "no C++ compiler" in layers_to_compile(trainer.model)[1]
        loss_and_gradients(trainer, inputs)
    (line,) = told
    assert "torch cannot compile LlamaDecoderLayer" in line


def test_attention_that_is_not_torch_s_is_left_alone(tmp_path):
    trainer, plain = pair(tmp_path, model_init_kwargs={"attn_implementation": "eager"})
    inputs = make_inputs()
    with traced_layers() as counts:
        assert largest_error(loss_and_gradients(trainer, inputs), loss_and_gradients(plain, inputs)) < 1e-5
    assert counts["eager"] > 0


def add_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def add_forward(model):
    for layer in model.model.layers:
        layer.mlp.forward = layer.mlp.forward


def other_weights(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.ds_id = 1  # as ZeRO-3 marks what it gathers


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_hook, "a hook on LlamaMLP runs inside of LlamaDecoderLayer"),
        (add_forward, "LlamaMLP has a forward of its own"),
        (other_weights, "LlamaDecoderLayer has weights that are gathered"),
        (lambda model: model.model.layers[0].mlp.compile(), "the model, or a part of it, is compiled already"),
        (lambda model: setattr(model.model, "layers", nn.ModuleList()), "its decoder layers are not known"),
    ],
    ids=["hook", "forward", "weights", "compiled", "none"],
)
def test_what_is_not_compiled_has_a_reason(change, reason):
    model = built("llama")
    assert layers_to_compile(model)[1] is None
    change(model)
    assert reason in layers_to_compile(model)[1]


def test_a_compiler_that_is_switched_off_is_told_of():
    with torch._dynamo.config.patch(disable=True):
        assert "torch.compile is switched off" in layers_to_compile(built("llama"))[1]


class Attention(nn.Module):
    is_causal = True


@pytest.mark.sample(4)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shares", [True, False], ids=["shared-prompt", "own-prompts"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_attention_as_the_compiler_sees_it_has_the_gradients_of_float64(shares, window, backend):
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([*range(5), *range(12), *range(5), *range(12, 15)])
    shared = SharedPrefixKV.at(index, 15) if shares else None
    lengths, key_lengths = ([5, 7, 3], [5, 12, 8]) if shares else ([5, 7, 3], [5, 7, 3])
    options = cu_seqlens_arguments(lengths, key_lengths, shared, torch.device("cpu"))
    tensors = [torch.randn(1, heads, 15, 16, generator=generator) for heads in (4, 2, 2)]
    grad = torch.randn(1, 15, 4, 16, generator=generator)

    def attend(query, key, value, options):
        return traced_attention(Attention(), query, key, value, None, packed_window=window, scaling=0.3, **options)

    def gradients(function, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]

    function = attend if backend is None else torch.compile(attend, dynamic=True, fullgraph=True, backend=backend)
    truth = gradients(
        lambda *leaves: varlen_attention(None, *leaves, scaling=0.3, sliding_window=window, **options), torch.float64
    )
    found = gradients(lambda *leaves: function(*leaves, options), torch.float32)
    assert all(relative_error(mine.double(), other) < 1e-5 for mine, other in zip(found, truth, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 129, 1024])
@pytest.mark.parametrize("rows", [41, 4099, 40_961])
def test_sums_count_the_rows_that_there_are(rows, width):
    """A sum over each row and one over all rows, as in a norm's backward, where the last block of rows is not full."""
    weight = nn.Parameter(torch.ones(width, device="cuda"))  # a width that torch's compiler takes for fixed

    def sums(x):
        y = x * weight + 0.25
        return y.sum(1), y.sum(0)

    x = torch.randn(rows, width, device="cuda")
    compiled = torch.compile(sums, dynamic=True, fullgraph=True, backend=torch_compat.inductor)
    for found, expected in zip(compiled(x), sums(x.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)
