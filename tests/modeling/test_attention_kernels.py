"""
The algebra of attention over packed rows against float64, with emulated kernels: sinks on FlashAttention's log-sum-exp,
windows and chunks. `test_attention_gpu.py` runs the kernels themselves.
"""

import pytest
import torch

from tests.attention_oracle import packed_attention
from tests.modeling.flash_emulation import (
    APART,
    HEADS,
    KEY_HEADS,
    SEQUENCES,
    SHARED,
    WINDOWS,
    arguments,
    assert_same_with_gradients,
    boundaries_of,
    emulated_backward,
    emulated_forward,
    random_tensors,
)
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention.sinks import sink_attention
from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, chunked, gathered_keys, varlen_attention


@pytest.fixture(params=[False, True], ids=["lse-by-token", "lse-by-sequence"])
def emulated_flash(request, monkeypatch):
    monkeypatch.setattr(torch_compat, "flash_attention", emulated_forward(request.param))
    monkeypatch.setattr(torch_compat, "flash_attention_backward", emulated_backward)


@pytest.mark.parametrize("widths", [(16, 16), (16, 8), (12, 20)], ids=["equal", "narrow-values", "odd"])
@WINDOWS
@SEQUENCES
def test_sinks_on_flash_attention_s_log_sum_exp(emulated_flash, sequences, window, widths):
    inputs = random_tensors(20, *widths)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    options = arguments(*sequences, 20)
    query, *key_value = inputs
    key, value = gathered_keys(*key_value, options.get("shared_prefix_kv"))
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    output = sink_attention(queries, keys, values, sinks, boundaries_of(options), 0.3, window)[None]
    expected = packed_attention(*inputs, *sequences, scaling=0.3, window=window, sinks=sinks)
    assert_same_with_gradients(output, expected, [*inputs, sinks])


@pytest.mark.parametrize("widths", [(16, 16), (12, 20)], ids=["equal", "odd"])
@WINDOWS
@SEQUENCES
def test_flash_attention(emulated_flash, monkeypatch, sequences, window, widths):
    """A window counts the query among its tokens, FlashAttention those on its left."""
    monkeypatch.setattr("trl_fused_grpo.modeling.attention.varlen.flash_takes", lambda query, value: True)
    inputs = random_tensors(20, *widths)
    output = varlen_attention(None, *inputs, **arguments(*sequences, 20), scaling=0.3, sliding_window=window)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, window=window)
    assert_same_with_gradients(output, expected, inputs)


# Where keys stand: once, three times and twice, and one, or the last, not at all
RAGGED = [0, 1, 2, 3, 0, 1, 5, 0, 1, 6, 3, 7, 8]


@pytest.mark.parametrize("count", [9, 10], ids=["all-but-one", "not-the-last"])
def test_gradients_of_keys_that_several_sequences_see_add_up_as_autograd_s_do(count):
    places = SharedPrefixKV.at(torch.tensor(RAGGED), count)
    keys = torch.randn(1, KEY_HEADS, count, 4, dtype=torch.float64, requires_grad=True)
    expected = keys.index_select(2, torch.tensor(RAGGED))
    found, _ = gathered_keys(keys, keys, places)
    assert_same_with_gradients(found, expected, [keys], tolerance=1e-14)


def test_gradients_of_shared_keys_are_rounded_once():
    copies = 64
    places = SharedPrefixKV.at(torch.arange(3).repeat(copies), 3)
    keys = torch.randn(1, KEY_HEADS, 3, 4).bfloat16().requires_grad_()
    found, _ = gathered_keys(keys, keys, places)
    weight = torch.randn(found.shape).bfloat16()
    (grad,) = torch.autograd.grad((found * weight).sum(), keys)
    exact = weight.double().unflatten(2, (copies, 3)).sum(2)
    assert torch.equal(grad, exact.float().bfloat16())


@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
def test_flash_attention_under_autocast_casts_its_inputs_and_their_gradients_back(
    emulated_flash, monkeypatch, sequences
):
    monkeypatch.setattr("trl_fused_grpo.modeling.attention.varlen.flash_takes", lambda query, value: True)
    query, key, value = random_tensors(20, dtype=torch.float32)
    frozen = value.detach().bfloat16()
    options = {**arguments(*sequences, 20), "scaling": 0.3}
    with torch.autocast("cpu", torch.bfloat16):
        output = varlen_attention(None, query, key, frozen, **options)
    cast = [query.detach().bfloat16().requires_grad_(), key.detach().bfloat16().requires_grad_()]
    expected = varlen_attention(None, *cast, frozen, **options)
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    found = torch.autograd.grad(output.sum(), (query, key))
    for gradient, other in zip(found, torch.autograd.grad(expected.sum(), cast), strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())


def test_a_frozen_sink_gets_no_gradient(emulated_flash):
    inputs = random_tensors(20)
    options = arguments(*APART, 20)
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in inputs)
    output = sink_attention(queries, keys, values, torch.zeros(HEADS), boundaries_of(options), None, None)
    output.sum().backward()
    assert all(t.grad is not None for t in inputs)


def windows_of(window):
    return {
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
    }


def emulated_efficient(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask, *, scale, window_size, **_):
    rows = (t.squeeze(0) for t in (q, k, v))
    forward = emulated_forward(False)
    output, *rest = forward(
        *rows, cu_q, cu_k, max_q, max_k, dropout, window_size is None, False, scale=scale, **windows_of(window_size)
    )
    return output[None], *rest


def emulated_efficient_backward(
    grad, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, mask, _, *, scale, window_size
):
    """The kernel's own reckons its window from the first query of a sequence, as if that stood at the first key."""
    assert torch.equal(cu_q, cu_k)
    rows = (t.squeeze(0) for t in (grad, q, k, v, out))
    grads = emulated_backward(
        *(*rows, lse, cu_q, cu_k, max_q, max_k, dropout, False, seed, offset),
        scale=scale,
        **windows_of(window_size),
    )
    return *(grad[None] for grad in grads), None


@pytest.mark.parametrize("widths", [(16, 16), (12, 20)], ids=["equal", "odd"])
@WINDOWS
@SEQUENCES
def test_memory_efficient_attention(monkeypatch, sequences, window, widths):
    monkeypatch.setattr("trl_fused_grpo.modeling.attention.varlen.efficient_takes", lambda query: True)
    monkeypatch.setattr(torch_compat, "efficient_attention", emulated_efficient)
    monkeypatch.setattr(torch_compat, "efficient_attention_backward", emulated_efficient_backward)
    inputs = random_tensors(20, *widths)
    output = varlen_attention(None, *inputs, **arguments(*sequences, 20), scaling=0.3, sliding_window=window)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, window=window)
    assert_same_with_gradients(output, expected, inputs)


@pytest.mark.parametrize("tokens", [2, 3, 4, 100])
@SEQUENCES
def test_chunks_are_sequences_of_their_own(sequences, tokens):
    inputs = random_tensors(20)
    options = chunked(arguments(*sequences, 20), tokens)
    output = varlen_attention(None, *inputs, **options, scaling=0.3)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, chunk=tokens)
    assert_same_with_gradients(output, expected, inputs)
    assert min(options["cu_seq_lens_q"].diff()) > 0
