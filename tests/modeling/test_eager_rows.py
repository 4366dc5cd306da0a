"""Models that load with transformers' eager attention: their own function runs over packed rows, or its formula."""

import gc

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, short_rows
from tests.modeling.test_layout_refusals import NO_AUX_LOSS, SLIDING, WINDOW, config_of
from trl_fused_grpo.modeling.attention.packed import uninstall_attention, watched_call
from trl_fused_grpo.modeling.attention.watch import WatchedCall


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDES = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING}
LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES = {
    "llama": lambda: config_of("LlamaConfig"),
    "gemma2": lambda: config_of("Gemma2Config", **SLIDES, attn_logit_softcapping=2.0),
    "gemma3": lambda: config_of("Gemma3TextConfig", **SLIDES),
    "gpt-oss": lambda: config_of("GptOssConfig", **SLIDES, **EXPERTS),
    "deepseek-v3": lambda: config_of("DeepseekV3Config", **LATENT),
}
STOCK = modeling_llama.eager_attention_forward, modeling_gpt_oss.eager_attention_forward


def registered():
    return modeling_llama.eager_attention_forward, modeling_gpt_oss.eager_attention_forward


@pytest.fixture(autouse=True)
def transformers_own():
    """Before and after each test the modeling files hold transformers' own functions."""
    uninstall_attention()
    assert registered() == STOCK
    yield
    gc.collect()
    assert registered() == STOCK


@pytest.mark.sample(4)
@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_models_are_packed(tmp_path, family, shares):
    make_model = from_config(FAMILIES[family](), "eager")
    fused, stock = make_pair(tmp_path, make_model, NO_AUX_LOSS, fused_share_prompts=shares)
    with torch.no_grad():  # sinks and norms begin at zero
        for trainer in (fused, stock):
            for parameter in trainer.model.parameters():
                parameter += torch.arange(parameter.numel()).view_as(parameter).sin() * 0.1
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_layers_that_are_computed_again_attend_as_before(tmp_path, family):
    fused, stock = make_pair(tmp_path, from_config(FAMILIES[family](), "eager"), NO_AUX_LOSS)
    for trainer in (fused, stock):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"


def test_attention_that_drops_out_keeps_the_padding(tmp_path):
    config = LlamaConfig(**SHAPE, attention_dropout=0.5)
    fused, stock = make_pair(tmp_path, from_config(config, "eager"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "padded"


def test_only_the_files_of_the_model_are_touched():
    model = from_config(LlamaConfig(**SHAPE), "eager")()
    with watched_call(WatchedCall(), model):
        assert modeling_llama.eager_attention_forward is not STOCK[0]
        assert modeling_gpt_oss.eager_attention_forward is STOCK[1]
    assert registered() == STOCK


def test_a_function_of_the_user_s_own_stays_and_rows_are_padded(tmp_path, monkeypatch):
    calls = []

    def own(*args, **kwargs):
        calls.append(kwargs)
        return STOCK[0](*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", own)
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE), "eager"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "padded"
    assert modeling_llama.eager_attention_forward is own
    assert calls
    monkeypatch.undo()


CHUNKS = {
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 4,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_are_counted_from_the_first_token_of_a_sequence(tmp_path, attention):
    """Against TRL's padding in our trainer: some releases of TRL cannot run Llama 4."""
    make_model = from_config(config_of("Llama4TextConfig", **CHUNKS), attention)
    packed, padded = (
        make_pair(tmp_path, make_model, NO_AUX_LOSS, fused_layout=layout)[0] for layout in (None, "padded")
    )
    rows = short_rows()
    torch.testing.assert_close(log_probs(packed, rows), log_probs(padded, rows), rtol=1e-5, atol=1e-5)
    assert_trains_as_stock(packed, padded, rows)
    assert packed.fused_layout() == "packed"
