"""Compiled norms, MLPs and rotary embeddings on a GPU: no further from float64 than the model itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trl_fused_grpo.modeling import compiled_functions
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def built():
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 1000}
    config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=4, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config).cuda().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gradients(model, length, is_on=False, cast=False):
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(length)).cuda()
    model.zero_grad()
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=cast),
        lean_checkpoints(model),
        compiling(model, is_on),
        compiled_forwards(model),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
def test_gradients_are_no_further_from_the_truth_than_the_model_s(cast):
    model = built()
    lengths = (700, 1301, 64)
    truths = [gradients(built().double(), length) for length in lengths]
    errors = [
        (gradients(model, length, cast=cast) - truth).norm() for length, truth in zip(lengths, truths, strict=True)
    ]
    before = compiled_functions.compilations.total()
    gradients(model, 333, is_on=True, cast=cast)
    compilations = compiled_functions.compilations.total()
    found = [gradients(model, length, is_on=True, cast=cast) for length in lengths]
    assert compilations > before
    assert compiled_functions.compilations.total() == compilations  # no other length is compiled for
    for mine, error, truth in zip(found, errors, truths, strict=True):
        assert (mine - truth).norm() <= max(1.1 * error, 1e-5 * truth.norm())
