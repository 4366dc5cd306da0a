"""What checkpointed layers keep for backward: the same gradients with fewer computations."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.modeling.flash_emulation import emulated_backward, emulated_forward, random_tensors
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import checkpointing
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.fused_forward import run_backbone
from trl_fused_grpo.modeling.kept_activations import KeptActivations, LastLayers, MeasuredActivations, recalled
from trl_fused_grpo.modeling.varlen_attention import cu_seqlens_arguments, varlen_attention
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config


class Costly(torch.autograd.Function):
    """A square that counts how often it is computed."""

    computed = 0

    @staticmethod
    def forward(ctx, x):
        def compute():
            Costly.computed += 1
            return (x * x,)

        ctx.save_for_backward(x)
        return recalled(compute)[0]

    @staticmethod
    def backward(ctx, *grads):
        return 2 * ctx.saved_tensors[0] * grads[0]


def squares(x):
    return Costly.apply(Costly.apply(x.sin()).exp()).cos()


@pytest.mark.parametrize("attention", [True, False], ids=["kept", "not-kept"])
def test_kept_results_are_computed_once(attention):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(squares(x).sum(), x)
    Costly.computed = 0
    kept = KeptActivations(attention_bytes=2 * x.nbytes) if attention else MeasuredActivations()
    output = checkpointing._checkpoint(kept, squares, x)
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert Costly.computed == (2 if attention else 4)
    (second,) = torch.autograd.grad(output.sum(), x)  # what was kept is given up
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert kept.attention_bytes == 0
    if isinstance(kept, MeasuredActivations):
        assert kept.of_layers == [(3 * x.nbytes, 2 * x.nbytes)]


def test_of_two_costly_results_one_is_kept_where_memory_is_for_one():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(squares(x).sum(), x)
    Costly.computed = 0
    output = checkpointing._checkpoint(KeptActivations(attention_bytes=x.nbytes), squares, x)
    (found,) = torch.autograd.grad(output.sum(), x)
    assert Costly.computed == 3 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("tokens", "is_only_run", "kept_by"),
    [
        (12, True, []),  # as many tokens as TRL's rows
        (10, True, [1, 2, 4, 5]),  # two tokens fewer: three layers have room for two results
        (6, True, [0, 1, 2, 3, 4, 5]),
        (10, False, []),  # there are tokens in other runs too
    ],
)
def test_attention_is_kept_in_the_memory_of_padding(tokens, is_only_run, kept_by):
    """Three numbers of attention's, where each token that padding has more is one: as soon as there are enough."""
    hidden = torch.zeros(1, tokens, 1)
    kept = KeptActivations(padded_tokens=12)
    kept.begin_run(is_only_run)
    found = []
    for layer in range(6):
        calls = []

        def attention(calls=calls):
            calls.append(1)
            return (torch.zeros(3),)

        assert kept.next_is_checkpointed(hidden)
        results = kept.costly_results()
        if results is None:
            continue
        with results.of_call():
            recalled(attention)
        with results.of_recomputation():
            recalled(attention)
        found += [layer] * (len(calls) == 1)
    assert found == kept_by


def test_the_last_layers_keep_what_gradients_will_take():
    """Six layers of two results of three numbers each: 12 bytes a result, of which there are bytes for five."""
    hidden = torch.zeros(1, 4, 1)
    kept = KeptActivations(padded_tokens=4, last=LastLayers(6, lambda tokens: 15 * tokens))
    for _ in range(2):  # another layout was tried before
        kept.begin_run(True)
        taken = []
        for layer in range(6):
            kept.next_is_checkpointed(hidden)
            taken += [layer for _ in range(2) if kept.takes_attention(12)]
        assert taken == [1, 2, 3, 4, 5]
    kept.begin_run(False)
    assert kept.next_is_checkpointed(hidden) and not kept.takes_attention(12)


def test_attention_that_is_kept_has_the_same_gradients(monkeypatch):
    calls = []

    def forward(*args, **kwargs):
        calls.append(1)
        return emulated_forward(False)(*args, **kwargs)

    monkeypatch.setattr("trl_fused_grpo.modeling.varlen_attention.flash_takes", lambda query, value: True)
    monkeypatch.setattr(torch_compat, "flash_attention", forward)
    monkeypatch.setattr(torch_compat, "flash_attention_backward", emulated_backward)
    inputs = random_tensors(20)
    boundaries = cu_seqlens_arguments([7, 1, 12], [7, 1, 12], None, torch.device("cpu"))

    def attention(*tensors):
        return varlen_attention(None, *(tensor.sin() for tensor in tensors), **boundaries).cos()

    found = []
    for enough in (1, 10**6):
        calls.clear()
        output = checkpointing._checkpoint(KeptActivations(attention_bytes=enough), attention, *inputs)
        found.append((output.detach(), *torch.autograd.grad(output.sum(), inputs)))
        assert len(calls) == (2 if enough == 1 else 1)
    assert all(relative_error(mine, other) == 0 for mine, other in zip(*found, strict=True))


@pytest.mark.parametrize("checkpointed", [None, 2, 1, 0])
def test_the_last_layers_are_computed_once(checkpointed):
    torch.manual_seed(0)
    config = model_config("llama")
    config.num_hidden_layers = 3
    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, VOCAB_SIZE, (2, 7))
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.append(index))

    def gradients(kept):
        calls.clear()
        model.zero_grad()
        with lean_checkpoints(model, kept):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(None)
    kept = KeptActivations(checkpointed=checkpointed)
    found = gradients(kept)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    twice = 3 if checkpointed is None else checkpointed
    assert [calls.count(index) for index in range(3)] == [2] * twice + [1] * (3 - twice)
    assert kept.layer == 3


def test_what_a_layer_keeps_is_measured_without_its_input_and_weights():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(5, 8, requires_grad=True)
    kept = MeasuredActivations([weight], lambda: 7)
    checkpointing._checkpoint(
        kept, lambda x: (torch.nn.functional.linear(x, weight).sigmoid() @ weight).exp(), x
    ).sum().backward()
    assert kept.of_layers == [(2 * x.nbytes, 0)]  # what the sigmoid and the exponential returned
    assert kept.peak == 7


def test_each_run_of_a_forward_keeps_its_last_layers():
    """Rows that are aligned in several widths, or padded by micro-batch, run through the model group by group."""
    model = AutoModelForCausalLM.from_config(model_config("llama")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = len(model.model.layers)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("first"))
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda *_: calls.append("last"))

    def keep(kept, runs):
        calls.clear()
        with lean_checkpoints(model, kept):
            losses = [
                run_backbone(model, {"input_ids": torch.full((1, tokens), 5)}).last_hidden_state.sum()
                for tokens in runs
            ]
        sum(losses).backward()
        return kept

    keep(KeptActivations(checkpointed=layers - 1), runs=[4, 6])
    assert (calls.count("first"), calls.count("last")) == (4, 2)
    weights = list(model.parameters())
    one, other, both = (keep(MeasuredActivations(weights), runs) for runs in ([4], [6], [4, 6]))
    assert len(both.of_layers) == layers
    for first, second, found in zip(one.of_layers, other.of_layers, both.of_layers, strict=True):
        assert found.everything == pytest.approx(first.everything + second.everything, rel=0.1)


def test_the_memory_of_padding_is_there_once_however_often_a_forward_is_tried():
    kept = KeptActivations(padded_tokens=12)
    for _ in range(2):  # the first layout may have been refused when its layers had run
        kept.begin_run(True)
        for _ in range(3):
            kept.next_is_checkpointed(torch.zeros(1, 10, 1))
        assert kept.attention_bytes == 3 * 2 * 4
