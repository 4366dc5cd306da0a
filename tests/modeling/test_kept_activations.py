"""What checkpointed layers keep for backward: the same gradients with fewer computations."""

import pytest
import torch

from tests.modeling.flash_emulation import emulated_backward, emulated_forward, random_tensors
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import checkpointing
from trl_fused_grpo.modeling.kept_activations import KeptActivations, LastLayers, recalled
from trl_fused_grpo.modeling.varlen_attention import cu_seqlens_arguments, varlen_attention


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
    kept = KeptActivations(attention_bytes=2 * x.nbytes if attention else 0)
    output = checkpointing._checkpoint(kept, squares, x)
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert Costly.computed == (2 if attention else 4)
    (second,) = torch.autograd.grad(output.sum(), x)  # what was kept is given up
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert kept.attention_bytes == 0


def test_of_two_costly_results_one_is_kept_where_memory_is_for_one():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(squares(x).sum(), x)
    Costly.computed = 0
    output = checkpointing._checkpoint(KeptActivations(attention_bytes=x.nbytes), squares, x)
    (found,) = torch.autograd.grad(output.sum(), x)
    assert Costly.computed == 3 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("tokens", "kept_by"),
    [
        (12, []),  # as many tokens as TRL's rows
        (10, [1, 2, 4, 5]),  # two tokens fewer: three layers have room for two results
        (6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_attention_is_kept_in_the_memory_of_padding(tokens, kept_by):
    """Three numbers of attention's, where each token that padding has more is one: as soon as there are enough."""
    hidden = torch.zeros(1, tokens, 1)
    kept = KeptActivations(padded_tokens=12)
    kept.begin_run()
    found = []
    for layer in range(6):
        calls = []

        def attention(calls=calls):
            calls.append(1)
            return (torch.zeros(3),)

        kept.begin_layer(hidden)
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
        kept.begin_run()
        taken = []
        for layer in range(6):
            kept.begin_layer(hidden)
            taken += [layer for _ in range(2) if kept.takes_attention(12)]
        assert taken == [1, 2, 3, 4, 5]


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


def test_the_memory_of_padding_is_there_once_however_often_a_forward_is_tried():
    kept = KeptActivations(padded_tokens=12)
    for _ in range(2):  # the first layout may have been refused when its layers had run
        kept.begin_run()
        for _ in range(3):
            kept.begin_layer(torch.zeros(1, 10, 1))
        assert kept.attention_bytes == 3 * 2 * 4
