"""
Models with transformers' FlashAttention: its own function runs over packed rows and shared prompts. The kernel is a
stand-in ([`flash_attn_stand_in`]); all other code is transformers' own.
"""

import pytest
from transformers import AttentionInterface

from tests.layout_pairs import assert_trains_as_stock, from_config, make_pair, seeded, short_rows
from tests.modeling import flash_attn_stand_in
from tests.modeling.test_layout_refusals import NO_AUX_LOSS, SLIDING, WINDOW, config_of
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo.modeling.attention.packed import uninstall_attention, watched_call
from trl_fused_grpo.modeling.attention.watch import WatchedCall


SLIDES = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING}
FAMILIES = {
    "llama": lambda: config_of("LlamaConfig"),
    "qwen3": lambda: config_of("Qwen3Config", **SLIDES, use_sliding_window=True),
    "gemma2": lambda: config_of("Gemma2Config", **SLIDES, attn_logit_softcapping=2.0),
}
HUB_KERNEL = "kernels-community/flash-attn2"  # transformers registers it under this name


@pytest.fixture(params=["flash_attention_2", HUB_KERNEL])
def implementation(request, monkeypatch):
    """The name of an attention whose kernel is the stand-in."""
    calls = flash_attn_stand_in.install(monkeypatch)
    if request.param == HUB_KERNEL:
        flash_attn_stand_in.register_as_hub_kernel(monkeypatch, HUB_KERNEL)
    yield request.param, calls
    uninstall_attention()


def with_flash(config, implementation):
    make = from_config(config, "eager")

    def make_model():
        model = make()
        model.config._attn_implementation = implementation  # transformers would look for a GPU
        return model

    return make_model


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_shares_prompts(tmp_path, family, implementation):
    name, calls = implementation
    fused, stock = make_pair(tmp_path, with_flash(FAMILIES[family](), name), NO_AUX_LOSS)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    calls.clear()
    seeded(fused, short_rows())
    assert calls
    assert all(tokens < keys for tokens, keys in calls)


@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
def test_checkpointed_layers(tmp_path, implementation, shares):
    make_model = with_flash(FAMILIES["qwen3"](), implementation[0])
    fused, stock = make_pair(tmp_path, make_model, fused_share_prompts=shares)
    for trainer in (fused, stock):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"


def test_transformers_has_its_own_functions_back():
    names = model_compat.flash_implementations()
    assert {"flash_attention_2", "flash_attention_3"} <= set(names)
    before = [AttentionInterface()[name] for name in names]
    with watched_call(WatchedCall()):
        assert not {AttentionInterface()[name] for name in names} & set(before)
        assert model_compat.flash_implementations() == names
    assert [AttentionInterface()[name] for name in names] == before
