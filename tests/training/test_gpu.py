"""What only a GPU can test of the trainer: Liger's layer kernels, and attention over packed rows."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, cu_seqlens_arguments, varlen_attention
from trl_fused_grpo.parity.tiny import VOCAB_SIZE
from trl_fused_grpo.training.checks import BOUNDS


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model(attention="sdpa"):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def on_device(inputs):
    return {name: value.cuda() for name, value in inputs.items()}


def test_use_liger_kernel_means_the_fused_loss_and_the_layer_kernels(tmp_path):
    inputs = on_device(make_inputs(rows=8))
    stock = make_trainer(tmp_path, GRPOTrainer, model=model(), use_cpu=False)
    _, expected = loss_and_gradients(stock, inputs)
    fused = make_trainer(tmp_path, model=model(), use_cpu=False, use_liger_kernel=True, max_steps=1)
    fused.train()  # transformers >= 5 replaces the layers when training starts
    assert fused.use_liger_loss
    assert "liger" in type(fused.model.model.norm).__module__ + fused.model.model.norm.forward.__module__
    fused.model.load_state_dict(stock.model.state_dict())
    _, gradients = loss_and_gradients(fused, inputs)
    assert fused.fused_stats.backward == "forecast"
    assert all(relative_error(gradients[name], expected[name]) < 1e-3 for name in expected)


def left_padded(width, padding=(21, 41, 0, 97), prompt=256):
    """A micro-batch whose completions fill the rest of `width` columns."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) >= torch.tensor(padding).unsqueeze(1)).long()
    ids = torch.randint(3, VOCAB_SIZE, mask.shape, generator=generator) * mask
    inputs = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.tensor([1.1, -0.7, 0.6, -0.4]),
        "num_items_in_batch": mask[:, prompt:].sum(),
    }
    return on_device(inputs)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("width", [1984, 2752, 2880, 3008])
def test_left_padding_gives_finite_gradients_with_cudnn_s_attention(tmp_path, width, checkpointing):
    """At these widths its gradients of queries without a key are NaN."""
    trainer = make_trainer(tmp_path, model=model().bfloat16(), use_cpu=False, fused_layout="padded")
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        _, gradients = loss_and_gradients(trainer, left_padded(width))
    assert trainer.fused_stats.layout == "padded"
    assert not trainer.fused_stats.leaves_cudnn_off
    with sdpa_kernel([SDPBackend.MATH]):
        _, expected = loss_and_gradients(trainer, left_padded(width))
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert relative_error(gradient, expected[name]) < 5e-2, name


# Lengths of queries and of keys of three sequences, and the place of each key. In the second case the second sequence
# attends to the first 4 tokens of the first one too
APART = ([7, 1, 12], [7, 1, 12], None)
SHARED = ([7, 1, 12], [7, 5, 12], [*range(7), *range(4), *range(7, 20)])


@pytest.mark.parametrize("window", [None, 5], ids=["full", "sliding-window"])
@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
def test_attention_over_packed_rows_stays_within_each_sequence(sequences, window):
    heads, key_heads, width = 4, 2, 64
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, n, 20, width, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, key_heads, key_heads)
    )
    *lengths, index = sequences
    device = torch.device("cuda")
    shared = None if index is None else SharedPrefixKV.at(torch.tensor(index, device=device), 20)
    boundaries = cu_seqlens_arguments(*lengths, shared, device)
    options = {**boundaries, "scaling": 0.1, "sliding_window": window}
    weight = torch.randn(1, 20, heads, width, device="cuda", generator=generator, dtype=torch.bfloat16)
    output = varlen_attention(None, query, key, value, **options)
    gradients = torch.autograd.grad((output * weight).sum(), (query, key, value))

    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    exact_output = varlen_attention(None, *exact, **options)  # sequence by sequence: FlashAttention knows no float64
    expected = torch.autograd.grad((exact_output * weight.double()).sum(), exact)
    assert relative_error(output, exact_output) < 1e-2
    assert all(relative_error(g, e) < 2e-2 for g, e in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fused_layout": "padded"}, torch.float32)],
    ids=["float32", "bf16", "padded"],
)
def test_a_comparison_with_trls_own_path_finds_no_more_than_rounding(tmp_path, options, dtype):
    trainer = make_trainer(tmp_path, model=model(), use_cpu=False, max_steps=2, fused_verify=1, **options)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    errors = [entry["fused/verify_logps"] for entry in steps]
    assert len(errors) == 2 and max(errors) < BOUNDS[dtype] / 2


def test_a_training_is_the_same_within_its_budget_of_memory(tmp_path):
    def trained(**options):
        trainer = make_trainer(
            tmp_path, optim="sgd", learning_rate=0.1, gradient_checkpointing=True, max_steps=4, use_cpu=False, **options
        )
        trainer.train()
        budget = trainer._fused.engine.memory
        assert (budget is None) == ("fused_memory" not in options)
        if budget is not None:
            assert budget.most_tokens(trainer.model.parameters()) > 1000
        return [parameter.detach() for parameter in trainer.model.parameters()]

    expected, found = trained(), trained(fused_memory=0.5)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
