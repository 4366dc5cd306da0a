"""Composite models that say less of their parts than those of transformers."""

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from tests.layout_pairs import SHAPE, assert_trains_as_stock, make_pair, short_rows
from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training.findings import Level


class PartsConfig(LlamaConfig):
    """Has the options of the text model itself, and beside them those of a vision tower."""

    def __init__(self, vision_config=None, **options):
        self.vision_config = vision_config
        super().__init__(**options)


class WithTower(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.vision_tower = CLIPVisionModel(config.vision_config)


def with_tower():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PartsConfig(CLIPVisionConfig(**shape, image_size=8, patch_size=4), **SHAPE)
    config._attn_implementation = "sdpa"
    return WithTower(config)


@pytest.fixture
def warnings(caplog):
    """The warnings about padding that were logged in this test."""
    return lambda: [record.message for record in caplog.records if "TRL's padding" in record.message]


def test_a_model_without_a_text_configuration_keeps_the_padding_and_says_so_once(tmp_path, warnings):
    fused, stock = make_pair(tmp_path, with_tower)
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    if trl_compat.LOGPS_FROM_LOGITS:  # which its own forward makes, whose code is not known
        findings = fused._fused.ladder.findings
        assert (findings.level, "WithTower" in findings.why_below(Level.HEAD)) == (Level.STOCK, True)
        return
    assert fused.fused_stats.layout == "padded"
    (warning,) = warnings()
    assert "WithTower" in warning
    with pytest.raises(ValueError, match="'packed' does not fit this model: its configuration names no text model"):
        make_pair(tmp_path, with_tower, fused_layout="packed")


class OwnText(nn.Module):
    """A text model that is no model of transformers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()


def test_a_text_model_of_the_users_own_is_found(tmp_path):
    def make():
        model = tiny_model("llava")
        model.model.language_model = OwnText(model.model.language_model)
        return model

    fused, stock = make_pair(tmp_path, make)
    assert isinstance(architecture.text_model(fused.model), OwnText)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_stats.layout == "padded"
