"""
Torch's attention kernels over packed rows on a GPU, against float64: sinks, soft caps, wide and mixed heads, windows,
chunks and shared prompts, forward and backward.
"""

import pytest
import torch
from torch.nn import attention
from trl import GRPOTrainer

from tests.attention_oracle import packed_attention, visible
from tests.layout_pairs import from_config, short_rows
from tests.modeling.attention_on_gpu import (
    HEADS,
    SCALING,
    SEQUENCES,
    SHARED,
    WINDOWS,
    arguments,
    assert_close_to_float64,
    eager_layer,
    random_tensors,
)
from tests.modeling.test_layout_refusals import NO_AUX_LOSS, config_of
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention import eager as eager_attention
from trl_fused_grpo.modeling.attention import kernels as attention_kernels
from trl_fused_grpo.modeling.attention.flex import why_no_flex
from trl_fused_grpo.modeling.attention.varlen import chunked, cu_seqlens_arguments, varlen_attention


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def refuse(*args, **kwargs):
    raise AssertionError("a kernel that should not be taken")


def refuse_with_reason(*args):
    reason = why_no_flex(*args)
    assert reason is None, reason


@pytest.fixture
def kernels_only(monkeypatch):
    """Fails where sequences would be computed one after the other."""
    monkeypatch.setattr(eager_attention, "_sequence_by_sequence", refuse)
    monkeypatch.setattr(eager_attention, "why_no_flex", refuse_with_reason)
    monkeypatch.setattr("trl_fused_grpo.modeling.attention.varlen._one_sequence", refuse)


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


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
@pytest.mark.parametrize("width", [64, 256])
@WINDOWS
@SEQUENCES
def test_soft_caps(kernels_only, sequences, window, width):
    def attention(query, key, value):
        layer = eager_layer("gemma2", {**arguments(*sequences), "softcap": 3.0}, window)
        return eager_attention.eager_attention(layer, query, key, value)

    inputs = random_tensors(width, width, torch.bfloat16)
    assert_close_to_float64(attention, inputs, sequences, 1e-2, window=window, softcap=3.0)


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "memory-efficient"])
@pytest.mark.parametrize("window", [1, 2, 50])
def test_a_window_has_its_tokens_and_no_other(kernels_only, window, dtype):
    """Each token's value is a column of its own, so that the output and the values' gradient tell which were seen."""
    count, lengths = 128, [60, 1, 67]
    query, key = (torch.zeros(1, 1, count, count, device="cuda", dtype=dtype) for _ in range(2))
    value = torch.eye(count, device="cuda", dtype=dtype)[None, None].requires_grad_()
    options = {**cu_seqlens_arguments(lengths, lengths, None, torch.device("cuda")), "sliding_window": window}
    output = varlen_attention(None, query, key, value, **options)[0, :, 0]  # [S, S]
    expected = torch.block_diag(*(visible(length, length, window).float() for length in lengths)).bool()
    assert torch.equal((output != 0).cpu(), expected)
    (grad,) = torch.autograd.grad((output * torch.eye(count, device="cuda", dtype=dtype)).sum(), value)
    # forward and backward round a weight of their own: a half where one token is seen beside this one
    assert relative_error(grad[0, 0].diagonal().cpu(), output.detach().diagonal().cpu()) < 1e-2
    (grad,) = torch.autograd.grad(varlen_attention(None, query, key, value, **options).sum(), value)
    expected = expected.float() / expected.sum(1, keepdim=True)  # each token spreads over what it sees
    assert relative_error(grad[0, 0, :, 0].cpu(), expected.sum(0)) < 1e-2


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


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
@pytest.mark.parametrize("length", [2, 60, 128, 129])
def test_flex_attention_of_few_tokens_without_gradient(kernels_only, length):
    rows = [t.detach()[:, :, :length].contiguous() for t in random_tensors(64, 64, torch.bfloat16)]
    sequences = [length - 1, 1], [length - 1, 1], None
    with torch.no_grad():
        layer = eager_layer("gemma2", {**arguments(*sequences), "softcap": 3.0}, None)
        output = eager_attention.eager_attention(layer, *rows)
    expected = packed_attention(*(t.double() for t in rows), *sequences, scaling=SCALING, softcap=3.0)
    assert relative_error(output, expected) < 1e-2


MODELS = {
    "gpt-oss": lambda: config_of("GptOssConfig", **WIDE_ENOUGH, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": lambda: config_of("Gemma2Config", **WIDE_ENOUGH, attn_logit_softcapping=5.0),
}
WIDE_ENOUGH = {"head_dim": 64, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", MODELS)
def test_eager_models_train_as_close_to_float32_as_stock(tmp_path, kernels_only, family, checkpoints):
    """Under bf16 autocast, which rounds: the measure is stock's own distance from float32, over several batches."""
    make_model = from_config(MODELS[family](), "eager")
    batches = [{name: value.cuda() for name, value in short_rows(seed=seed).items()} for seed in range(4)]

    def gradients(cls, **options):
        trainer = make_trainer(tmp_path, cls, model=make_model(), use_cpu=False, **NO_AUX_LOSS, **options)
        if checkpoints:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        found = [gradient for rows in batches for _, gradient in sorted(loss_and_gradients(trainer, rows)[1].items())]
        return trainer, torch.cat([gradient.flatten().double() for gradient in found])

    _, exact = gradients(GRPOTrainer)
    _, stock = gradients(GRPOTrainer, bf16=True)
    trainer, fused = gradients(FusedGRPOTrainer, bf16=True)
    assert trainer.fused_layout() == "packed"
    assert relative_error(fused, exact) < 1.2 * relative_error(stock, exact)


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


@pytest.fixture(params=["FA3", "FA4"])
def another_flash_attention(request):
    """While it lasts, torch's FlashAttention is the one of this name, as `activate_flash_attention_impl` has it."""
    pytest.importorskip({"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}[request.param])
    attention.activate_flash_attention_impl(request.param)
    yield request.param
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("width", [64, 128])
@WINDOWS
@SEQUENCES
def test_another_flash_attention_that_torch_was_given(another_flash_attention, kernels_only, sequences, window, width):
    assert torch_compat.flash_attention_name() == another_flash_attention
    inputs = random_tensors(width, width, torch.bfloat16)
    options = {**arguments(*sequences), "scaling": SCALING, "sliding_window": window}
    assert_close_to_float64(
        lambda query, key, value: varlen_attention(None, query, key, value, **options),
        inputs,
        sequences,
        2e-2,
        window=window,
    )
