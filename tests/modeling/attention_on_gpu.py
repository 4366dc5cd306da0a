"""Packed rows on a GPU, and attention over them compared with float64, forward and backward."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.attention_oracle import packed_attention
from tests.oracle import relative_error
from trl_fused_grpo.modeling.attention.eager import EagerLayer
from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, cu_seqlens_arguments


# Lengths of queries and of keys of the sequences, and the place of each key in the row. In the second case the second
# and the third sequence attend to the first tokens of the first one too
APART = ([70, 1, 300, 129], [70, 1, 300, 129], None)
SHARED = ([300, 1, 40, 159], [300, 201, 240, 159], [*range(300), *range(200), 300, *range(200), *range(301, 500)])
COUNT = 500
SEQUENCES = pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
WINDOWS = pytest.mark.parametrize("window", [None, 50], ids=["full", "sliding-window"])
HEADS, KEY_HEADS = 4, 2
SCALING = 0.2
NAMES = ("query", "key", "value", "sinks")


def random_tensors(width, value_width, dtype, key_heads=KEY_HEADS):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (HEADS, width), (key_heads, width), (key_heads, value_width)
    return [
        torch.randn(1, heads, COUNT, size, device="cuda", generator=generator).to(dtype).requires_grad_()
        for heads, size in shapes
    ]


def arguments(lengths, key_lengths, index):
    device = torch.device("cuda")
    shared = None if index is None else SharedPrefixKV.at(torch.tensor(index, device=device), COUNT)
    return cu_seqlens_arguments(lengths, key_lengths, shared, device)


def assert_close_to_float64(attention, inputs, sequences, tolerance, **options):
    """`attention(*inputs)` against the oracle with the same inputs in float64; `inputs` may end in the sinks."""
    exact = [t.detach().double().requires_grad_() for t in inputs]
    sinks = exact[3] if len(exact) > 3 else None
    expected = packed_attention(*exact[:3], *sequences, scaling=SCALING, sinks=sinks, **options)
    output = attention(*inputs)
    assert output.shape == expected.shape
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs)
    exact_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    pairs = {
        "output": (output, expected),
        **dict(zip(NAMES, zip(gradients, exact_gradients, strict=True), strict=False)),
    }
    errors = {name: float(relative_error(*pair)) for name, pair in pairs.items()}
    assert max(errors.values()) < tolerance, errors


def own_function(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward


def eager_layer(family, options, window, sinks=None):
    module = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, training=True, sinks=sinks)
    options = {**options, "scaling": SCALING, "dropout": 0.0}
    return EagerLayer(own_function(family), module, options, window, None, {})
