"""Flex attention over packed rows against float64: masks from blocks, one compilation, and why it is not taken."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.attention_oracle import packed_attention
from tests.modeling.flash_emulation import SHARED, arguments, boundaries_of, random_tensors
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention import flex as flex_kernel
from trl_fused_grpo.modeling.attention.flex import build_block_mask, flex_attention, not_compiled, why_no_flex
from trl_fused_grpo.modeling.attention.varlen import gathered_keys


LONG_SHARED = ([300, 1, 150], [300, 201, 150], [*range(300), *range(200), *range(300, 451)])


@pytest.mark.sample(5)
@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("sequences", [SHARED, LONG_SHARED], ids=["short", "several-blocks"])
def test_flex_attention_with_a_mask_from_blocks(sequences, window):
    """Not compiled, and the forward alone: that is what it has on the CPU."""
    count = sum(sequences[0])
    query, key, value = (t.detach() for t in random_tensors(count, dtype=torch.float32))
    options = arguments(*sequences, count)
    gathered = gathered_keys(key, value, options.get("shared_prefix_kv"))
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, *gathered))
    block_mask = build_block_mask(boundaries_of(options), count, len(keys), window)
    output = flex_attention(queries, keys, values, block_mask, 0.3, 2.0, attention=not_compiled)
    exact = [t.double() for t in (query, key, value)]
    expected = packed_attention(*exact, *sequences, scaling=0.3, window=window, softcap=2.0)
    assert relative_error(output[None], expected) < 1e-5


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
def test_flex_attention_is_traced_whole_and_once(monkeypatch):
    """By torch's compiler, in a checkpointed layer, without the kernels that it would generate on a GPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    traced = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(flex_kernel.torch, "compile", traced)
    flex_kernel._compiled.cache_clear()
    graphs = []
    for first in (450, 200):  # as many blocks as heads would be taken for the number of heads, and compiled again
        sequences = [first, 1, 150], [first, 201, 150], [*range(first), *range(200), *range(first, first + 151)]
        count = first + 151
        options = arguments(*sequences, count)
        inputs = random_tensors(count, dtype=torch.float32)

        def attention(query, key, value, options=options, count=count):
            key, value = gathered_keys(key, value, options["shared_prefix_kv"])
            mask = build_block_mask(boundaries_of(options), count, key.shape[2], 140)
            queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
            return flex_attention(queries, keys, values, mask, 0.3, 2.0)[None]

        output = checkpoint(attention, *inputs, use_reentrant=False)
        exact = [t.detach().double().requires_grad_() for t in inputs]
        expected = packed_attention(*exact, *sequences, scaling=0.3, window=140, softcap=2.0)
        assert relative_error(output, expected) < 1e-5
        weight = torch.randn_like(expected)
        found = torch.autograd.grad((output * weight).sum(), inputs)
        for gradient, other in zip(found, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
            assert relative_error(gradient, other) < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
    flex_kernel._compiled.cache_clear()


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
def test_the_mask_from_blocks_leaves_out_what_no_token_of_a_block_sees():
    options = arguments([512, 512], [512, 512], None, 1024)
    mask = build_block_mask(boundaries_of(options), 1024, 1024, None)
    partly, whole = mask.kv_num_blocks[0, 0].tolist(), mask.full_kv_num_blocks[0, 0].tolist()
    assert partly == [1] * 8  # the diagonal
    assert whole == [0, 1, 2, 3] * 2


def test_why_flex_attention_is_not_taken(monkeypatch):
    wide, odd = torch.empty(1, 1, 3, 64), torch.empty(1, 1, 3, 48)
    assert why_no_flex(odd, odd, odd, 0.3, 2.0) == "flex attention takes no heads of 48 and 48"
    assert why_no_flex(wide, wide, odd, 0.3, 2.0) == "flex attention takes no heads of 64 and 48"
    reason = "torch cannot compile flex attention here (RuntimeError: no compiler)"

    def compiled(*kind):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(flex_kernel, "_compiled", compiled)
    flex_kernel._why_not_compiled.cache_clear()
    assert why_no_flex(wide, wide, wide, 0.3, 2.0) == reason
    flex_kernel._why_not_compiled.cache_clear()
    monkeypatch.setattr(torch_compat, "flex_attention", None)
    assert "needs torch 2.9" in why_no_flex(wide, wide, wide, 0.3, 2.0)
