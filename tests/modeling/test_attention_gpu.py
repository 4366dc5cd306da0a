"""
Torch's attention kernels over packed rows on a GPU, against float64: sinks, soft caps, wide and mixed heads, windows,
chunks and shared prompts, forward and backward.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.attention_oracle import packed_attention
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import attention_kernels, eager_attention
from trl_fused_grpo.modeling.eager_attention import EagerLayer
from trl_fused_grpo.modeling.varlen_attention import SharedPrefixKV, chunked, cu_seqlens_arguments, varlen_attention


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Lengths of queries and of keys of the sequences, and the place of each key in the row. In the second case the second
# and the third sequence attend to the first tokens of the first one too
APART = ([70, 1, 300, 129], [70, 1, 300, 129], None)
SHARED = ([300, 1, 40, 159], [300, 201, 240, 159], [*range(300), *range(200), 300, *range(200), *range(301, 500)])
COUNT = 500
SEQUENCES = pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
WINDOWS = pytest.mark.parametrize("window", [None, 50], ids=["full", "sliding-window"])
HEADS, KEY_HEADS = 4, 2
SCALING = 0.2


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
    assert relative_error(output, expected) < tolerance
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs)
    exact_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    for name, gradient, exact_gradient in zip("query key value sinks".split(), gradients, exact_gradients):
        assert relative_error(gradient, exact_gradient) < tolerance, name


def own_function(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward


def refuse(*args, **kwargs):
    raise AssertionError("a kernel that should not be taken")


@pytest.fixture
def kernels_only(monkeypatch):
    """Fails where sequences would be computed one after the other."""
    monkeypatch.setattr(eager_attention, "_sequence_by_sequence", refuse)
    monkeypatch.setattr("trl_fused_grpo.modeling.varlen_attention._one_sequence", refuse)


def eager_layer(family, options, window, sinks=None):
    module = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, training=True, sinks=sinks)
    options = {**options, "scaling": SCALING, "dropout": 0.0}
    return EagerLayer(own_function(family), module, options, window, None, {})


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@WINDOWS
@SEQUENCES
def test_sinks(kernels_only, sequences, window, dtype, width):
    inputs = random_tensors(width, width, dtype)
    sinks = torch.tensor([0.5, 2.0, -1.0, 4.0], device="cuda", requires_grad=True)

    def attention(query, key, value, sinks):
        layer = eager_layer("gpt_oss", arguments(*sequences), window, sinks)
        return eager_attention.eager_attention(layer, query, key, value)

    assert_close_to_float64(attention, [*inputs, sinks], sequences, 1e-2, window=window)


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
@pytest.mark.parametrize("width", [64, 256])
@WINDOWS
@SEQUENCES
def test_soft_caps(kernels_only, sequences, window, width):
    def attention(query, key, value):
        layer = eager_layer("gemma2", {**arguments(*sequences), "softcap": 3.0}, window)
        return eager_attention.eager_attention(layer, query, key, value)

    inputs = random_tensors(width, width, torch.bfloat16)
    assert_close_to_float64(attention, inputs, sequences, 1e-2, window=window, softcap=3.0)


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="this torch has no flex attention with block masks")
def test_flex_attention_is_compiled_once_for_all_lengths(kernels_only):
    from torch._dynamo.utils import counters

    inputs = random_tensors(64, 64, torch.bfloat16)

    def run(count):
        layer = eager_layer("gemma2", {**arguments([count - 7, 7], [count - 7, 7], None), "softcap": 3.0}, None)
        rows = [t[:, :, :count] for t in inputs]
        eager_attention.eager_attention(layer, *rows).sum().backward()

    for count in (200, 333):
        run(count)
    before = counters["stats"]["unique_graphs"]
    for count in (250, 400, 480):
        run(count)
    assert counters["stats"]["unique_graphs"] == before


WIDE = {  # widths of queries and keys, and of values; the type
    "wide-heads": (512, 512, torch.bfloat16),
    "wide-heads-fp16": (320, 320, torch.float16),
    "float32": (64, 64, torch.float32),
    "wide-float32": (512, 512, torch.float32),
    "odd-float32": (20, 12, torch.float32),
}


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
@WINDOWS
@SEQUENCES
def test_wide_heads_and_float32(kernels_only, monkeypatch, sequences, window, shape):
    monkeypatch.setattr(torch_compat, "flash_attention", refuse)
    width, value_width, dtype = shape
    options = {**arguments(*sequences), "scaling": SCALING, "sliding_window": window}
    inputs = random_tensors(width, value_width, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2

    def attention(query, key, value):
        return varlen_attention(None, query, key, value, **options)

    assert_close_to_float64(attention, inputs, sequences, tolerance, window=window)


@pytest.mark.parametrize("widths", [(192, 128), (48, 64), (20, 12)], ids=["latent", "wide-values", "odd"])
@WINDOWS
@SEQUENCES
def test_values_of_another_width(kernels_only, monkeypatch, sequences, window, widths):
    monkeypatch.setattr(torch_compat, "efficient_attention", refuse)
    options = {**arguments(*sequences), "scaling": SCALING, "sliding_window": window}
    inputs = random_tensors(*widths, torch.bfloat16, key_heads=HEADS)

    def attention(query, key, value):
        return varlen_attention(None, query, key, value, **options)

    assert_close_to_float64(attention, inputs, sequences, 1e-2, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("tokens", [64, 150])
@SEQUENCES
def test_chunks(kernels_only, sequences, tokens, dtype):
    options = {**chunked(arguments(*sequences), tokens), "scaling": SCALING}

    def attention(query, key, value):
        return varlen_attention(None, query, key, value, **options)

    inputs = random_tensors(64, 64, dtype)
    assert_close_to_float64(attention, inputs, sequences, 1e-2 if dtype == torch.bfloat16 else 1e-5, chunk=tokens)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_the_kernel_is_closer_to_float64_than_the_model_s_own_function(family):
    """In bfloat16, where a model's function rounds its scores."""
    inputs = [t.detach() for t in random_tensors(64, 64, torch.bfloat16)]
    sinks = torch.tensor([0.5, 2.0, -1.0, 4.0], device="cuda")
    softcap = {"softcap": 3.0} if family == "gemma2" else {}
    layer = eager_layer(family, {**arguments(*SHARED), **softcap}, None, sinks.bfloat16())
    has_sinks = family == "gpt_oss"
    exact = [t.double() for t in inputs]
    expected = packed_attention(
        *exact, *SHARED, scaling=SCALING, sinks=sinks.double() if has_sinks else None, **softcap
    )
    errors = [
        relative_error(run(layer, *inputs), expected)
        for run in (eager_attention.eager_attention, eager_attention._sequence_by_sequence)
    ]
    assert errors[0] <= errors[1]


def test_float32_eager_attention_is_the_model_s_own(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_widest_head", refuse)
    inputs = random_tensors(64, 64, torch.float32)
    sinks = torch.tensor([0.5, 2.0, -1.0, 4.0], device="cuda", requires_grad=True)

    def attention(query, key, value, sinks):
        layer = eager_layer("gpt_oss", arguments(*SHARED), 50, sinks)
        return eager_attention.eager_attention(layer, query, key, value)

    assert_close_to_float64(attention, [*inputs, sinks], SHARED, 1e-4, window=50)
