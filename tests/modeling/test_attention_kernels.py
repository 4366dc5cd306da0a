"""
The algebra of attention over packed rows against float64: sinks on FlashAttention's log-sum-exp, masks from blocks,
chunks, and which formula a modeling file's own function computes. `test_attention_gpu.py` runs the kernels themselves.
"""

import functools
import importlib
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.attention_oracle import packed_attention, visible
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import eager_attention as eager
from trl_fused_grpo.modeling import eager_formula, flex_kernel
from trl_fused_grpo.modeling.attention_kernels import Boundaries
from trl_fused_grpo.modeling.checkpointing import checkpoint
from trl_fused_grpo.modeling.flex_kernel import build_block_mask, flex_attention, not_compiled, why_no_flex
from trl_fused_grpo.modeling.sink_attention import sink_attention
from trl_fused_grpo.modeling.varlen_attention import (
    SharedPrefixKV,
    chunked,
    cu_seqlens_arguments,
    gathered_keys,
    varlen_attention,
)


HEADS, KEY_HEADS, WIDTH = 4, 2, 16
# Lengths of queries and of keys of three sequences, and the place of each key. In the second case the second sequence
# attends to the first 4 tokens of the first one too
APART = ([7, 1, 12], [7, 1, 12], None)
SHARED = ([7, 1, 12], [7, 5, 12], [*range(7), *range(4), *range(7, 20)])
SEQUENCES = pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
WINDOWS = pytest.mark.parametrize("window", [None, 3], ids=["full", "sliding-window"])


def random_tensors(count, width=WIDTH, value_width=WIDTH, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (HEADS, width), (KEY_HEADS, width), (KEY_HEADS, value_width)
    return [torch.randn(1, heads, count, width, dtype=dtype, requires_grad=True) for heads, width in shapes]


def arguments(lengths, key_lengths, index, count):
    shared = None if index is None else SharedPrefixKV.at(torch.tensor(index), count)
    return cu_seqlens_arguments(lengths, key_lengths, shared, torch.device("cpu"))


def boundaries_of(options):
    return Boundaries(*(options[name] for name in Boundaries._fields))


def assert_same_with_gradients(output, expected, inputs, tolerance=1e-10):
    assert output.shape == expected.shape
    assert relative_error(output, expected) < tolerance
    weight = torch.randn_like(expected)
    found, exact = (torch.autograd.grad((o * weight).sum(), inputs) for o in (output, expected))
    assert all(relative_error(mine, other) < tolerance for mine, other in zip(found, exact, strict=True))


def emulated_forward(by_sequence):
    """FlashAttention's forward over sequences, in any precision."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, **windows):
        outputs, lses = [], []
        for scores, _, _, value in score_parts(q, k, v, cu_q, cu_k, is_causal, scale, **windows):
            lse = scores.logsumexp(-1)  # [heads, s]
            outputs.append(((scores - lse[..., None]).exp() @ value).transpose(0, 1))
            lses.append(lse)
        lse = torch.cat(lses, dim=1)
        if by_sequence:  # as older kernels lay it out
            padded = [torch.nn.functional.pad(part, (0, max_q - part.shape[1]), value=float("inf")) for part in lses]
            lse = torch.stack(padded)
        return torch.cat(outputs), lse, torch.zeros(2), torch.zeros(()), torch.zeros(())

    return forward


def emulated_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, state, unused, *, scale, **windows
):
    """FlashAttention's backward: probabilities from the log-sum-exp that it is given, `dO . O` from the output."""
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    parts = score_parts(q, k, v, cu_q, cu_k, is_causal, scale, **windows)
    groups = q.shape[1] // k.shape[1]
    for i, (scores, rows, columns, value) in enumerate(parts):
        lse_here = lse[:, rows] if lse.dim() == 2 else lse[i, :, : scores.shape[1]]
        p = (scores - lse_here[..., None]).exp()  # [heads, s, k]
        d_out, o = grad[rows].transpose(0, 1), out[rows].transpose(0, 1)
        d_scores = p * (d_out @ value.transpose(1, 2) - (d_out * o).sum(-1, keepdim=True)) * scale
        key = k[columns].transpose(0, 1).repeat_interleave(groups, 0)
        grads[0][rows] = (d_scores @ key).transpose(0, 1)
        d_key, d_value = d_scores.transpose(1, 2) @ q[rows].transpose(0, 1), p.transpose(1, 2) @ d_out
        for target, part in ((grads[1], d_key), (grads[2], d_value)):
            target[columns] = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(grads)


def score_parts(q, k, v, cu_q, cu_k, is_causal, scale, *, window_size_left, window_size_right):
    assert is_causal == (window_size_left is None)
    assert window_size_right == (None if is_causal else 0)
    window = None if window_size_left is None else window_size_left + 1
    groups = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        key, value = (t[columns].transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
        scores = q[rows].transpose(0, 1) @ key.transpose(1, 2) * scale
        mask = visible(scores.shape[1], scores.shape[2], window)
        yield scores.masked_fill(~mask, float("-inf")), rows, columns, value


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
    monkeypatch.setattr("trl_fused_grpo.modeling.varlen_attention.flash_takes", lambda query, value: True)
    inputs = random_tensors(20, *widths)
    output = varlen_attention(None, *inputs, **arguments(*sequences, 20), scaling=0.3, sliding_window=window)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, window=window)
    assert_same_with_gradients(output, expected, inputs)


@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
def test_flash_attention_under_autocast_casts_its_inputs_and_their_gradients_back(
    emulated_flash, monkeypatch, sequences
):
    monkeypatch.setattr("trl_fused_grpo.modeling.varlen_attention.flash_takes", lambda query, value: True)
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
    monkeypatch.setattr("trl_fused_grpo.modeling.varlen_attention.efficient_takes", lambda query: True)
    monkeypatch.setattr(torch_compat, "efficient_attention", emulated_efficient)
    monkeypatch.setattr(torch_compat, "efficient_attention_backward", emulated_efficient_backward)
    inputs = random_tensors(20, *widths)
    output = varlen_attention(None, *inputs, **arguments(*sequences, 20), scaling=0.3, sliding_window=window)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, window=window)
    assert_same_with_gradients(output, expected, inputs)


LONG_SHARED = ([300, 1, 150], [300, 201, 150], [*range(300), *range(200), *range(300, 451)])


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("sequences", [SHARED, LONG_SHARED], ids=["short", "several-blocks"])
def test_flex_attention_with_a_mask_from_blocks(sequences, window, softcap, has_sinks):
    """Not compiled, and the forward alone: that is what it has on the CPU."""
    count = sum(sequences[0])
    query, key, value = (t.detach() for t in random_tensors(count, dtype=torch.float32))
    sinks = torch.randn(HEADS) if has_sinks else None
    options = arguments(*sequences, count)
    gathered = gathered_keys(key, value, options.get("shared_prefix_kv"))
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, *gathered))
    block_mask = build_block_mask(boundaries_of(options), count, len(keys), window)
    output = flex_attention(queries, keys, values, block_mask, 0.3, softcap, sinks, attention=not_compiled)
    exact = [t.double() for t in (query, key, value)]
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    expected = packed_attention(*exact, *sequences, **options, sinks=sinks.double() if has_sinks else None)
    assert relative_error(output[None], expected) < 1e-5


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
def test_flex_attention_is_traced_whole_and_once(monkeypatch):
    """By torch's compiler, in a checkpointed layer, without the kernels that it would generate on a GPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    traced = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(flex_kernel.torch, "compile", traced)
    flex_kernel._compiled.cache_clear()
    sinks = torch.randn(HEADS, requires_grad=True)
    graphs = []
    for first in (450, 200):  # as many blocks as heads would be taken for the number of heads, and compiled again
        sequences = [first, 1, 150], [first, 201, 150], [*range(first), *range(200), *range(first, first + 151)]
        count = first + 151
        options = arguments(*sequences, count)
        inputs = [*random_tensors(count, dtype=torch.float32), sinks]

        def attention(query, key, value, sinks, options=options, count=count):
            key, value = gathered_keys(key, value, options["shared_prefix_kv"])
            mask = build_block_mask(boundaries_of(options), count, key.shape[2], 140)
            queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
            return flex_attention(queries, keys, values, mask, 0.3, 2.0, sinks)[None]

        output = checkpoint(attention, *inputs)
        exact = [t.detach().double().requires_grad_() for t in inputs]
        expected = packed_attention(*exact[:3], *sequences, scaling=0.3, window=140, softcap=2.0, sinks=exact[3])
        assert relative_error(output, expected) < 1e-5
        weight = torch.randn_like(expected)
        found = torch.autograd.grad((output * weight).sum(), inputs)
        for gradient, other in zip(found, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
            assert relative_error(gradient, other) < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
    flex_kernel._compiled.cache_clear()


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
def test_the_mask_from_blocks_leaves_out_what_no_token_of_a_block_sees():
    options = arguments([512, 512], [512, 512], None, 1024)
    mask = build_block_mask(boundaries_of(options), 1024, 1024, None)
    partly, whole = mask.kv_num_blocks[0, 0].tolist(), mask.full_kv_num_blocks[0, 0].tolist()
    assert partly == [1] * 8  # the diagonal
    assert whole == [0, 1, 2, 3] * 2


def test_why_flex_attention_is_not_taken(monkeypatch):
    wide, odd = torch.empty(1, 1, 3, 64), torch.empty(1, 1, 3, 48)
    assert why_no_flex(odd, odd, odd, 0.3, 2.0, False) == "flex attention takes no heads of 48 and 48"
    assert why_no_flex(wide, wide, odd, 0.3, 2.0, False) == "flex attention takes no heads of 64 and 48"
    reason = "torch cannot compile flex attention here (RuntimeError: no compiler)"

    def compiled(*kind):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(flex_kernel, "_compiled", compiled)
    flex_kernel._why_not_compiled.cache_clear()
    assert why_no_flex(wide, wide, wide, 0.3, 2.0, False) == reason
    flex_kernel._why_not_compiled.cache_clear()
    monkeypatch.setattr(torch_compat, "flex_attention", None)
    assert "has no flex attention" in why_no_flex(wide, wide, wide, 0.3, 2.0, False)


@pytest.mark.parametrize("tokens", [2, 3, 4, 100])
@SEQUENCES
def test_chunks_are_sequences_of_their_own(sequences, tokens):
    inputs = random_tensors(20)
    options = chunked(arguments(*sequences, 20), tokens)
    output = varlen_attention(None, *inputs, **options, scaling=0.3)
    expected = packed_attention(*inputs, *sequences, scaling=0.3, chunk=tokens)
    assert_same_with_gradients(output, expected, inputs)
    assert min(options["cu_seq_lens_q"].diff()) > 0


def own_function(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward


GIVEN = {"scaling": 0.1, "dropout": 0.0, "position_ids": torch.ones(1), "softcap": None}


@pytest.mark.parametrize(
    ("family", "module", "options", "expected"),
    [
        ("llama", SimpleNamespace(), {}, (False, False)),
        ("llama", SimpleNamespace(), {"softcap": 9.0}, (False, False)),  # it leaves out the cap
        ("gemma2", SimpleNamespace(), {}, (False, False)),
        ("gemma2", SimpleNamespace(), {"softcap": 9.0}, (True, False)),
        ("gpt_oss", SimpleNamespace(sinks=torch.ones(4)), {"s_aux": torch.ones(4)}, (False, True)),
        ("gpt_oss", SimpleNamespace(sinks=torch.ones(4)), {"scaling": None}, None),
    ],
)
def test_the_formula_of_a_model_s_own_function_is_found_by_numbers(family, module, options, expected):
    assert eager_formula.eager_formula(own_function(family), module, {**GIVEN, **options}) == expected


def reads_an_unknown_argument(module, query, key, value, mask, scaling, head_mask=None, **kwargs):
    output, _ = own_function("llama")(module, query, key, value, mask, scaling)
    return (output if head_mask is None else output * head_mask), None


def attends_otherwise(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value, mask, scaling * 2)


def detaches(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value.detach(), mask, scaling)


def reads_the_layer(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value, mask, scaling * module.factor)


@pytest.mark.parametrize("function", [attends_otherwise, detaches, reads_the_layer])
def test_another_formula_is_not_known(function):
    assert eager_formula.eager_formula(function, SimpleNamespace(), GIVEN) is None


def test_arguments_that_change_the_result_are_not_known():
    options = {**GIVEN, "head_mask": torch.ones(1)}
    assert eager_formula.eager_formula(reads_an_unknown_argument, SimpleNamespace(), GIVEN) is not None
    assert eager_formula.eager_formula(reads_an_unknown_argument, SimpleNamespace(), options) is None


def test_the_comparison_leaves_hooks_and_random_numbers_alone():
    def refuse(tensor):
        raise AssertionError

    eager_formula._compared.cache_clear()
    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), torch.no_grad():
        assert eager_formula.eager_formula(own_function("llama"), SimpleNamespace(), GIVEN) is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
def test_which_kernel_a_formula_gets(monkeypatch):
    """As on CUDA in half precision, with each kernel's float32 stand-in; all give what the model's function gives."""
    monkeypatch.setattr(eager, "_is_fast", lambda query: True)
    monkeypatch.setattr(eager, "flash_takes", lambda query, value: True)
    monkeypatch.setattr(torch_compat, "flash_attention", emulated_forward(False))
    monkeypatch.setattr(flex_kernel, "_compiled", lambda *kind: not_compiled)
    monkeypatch.setattr(flex_kernel, "_why_not_compiled", lambda *key: None)  # it has no backward on the CPU
    inputs = [t.detach() for t in random_tensors(20, dtype=torch.float32)]
    sinks, memo = torch.randn(HEADS), {}
    for family, own in {"llama": {}, "gpt_oss": {}, "gemma2": {"softcap": 2.0}}.items():
        module = SimpleNamespace(num_key_value_groups=2, training=True, sinks=sinks)
        options = {**arguments(*SHARED, 20), "scaling": 0.3, "dropout": 0.0, **own}
        layer = eager.EagerLayer(own_function(family), module, options, 3, None, memo)
        expected = eager._sequence_by_sequence(layer, *inputs)
        assert relative_error(eager.eager_attention(layer, *inputs), expected) < 1e-5
    assert list(memo) == [("flex", 3)]
