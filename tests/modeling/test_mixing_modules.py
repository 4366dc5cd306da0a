"""Modules of the user's that mix tokens train as in stock, in padded rows; models of the libraries' are packed."""

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from tests.layout_pairs import assert_trains_as_stock, make_pair, seeded, short_rows
from trl_fused_grpo._compat.models import PADDING_MATTERS
from trl_fused_grpo.modeling.attention.watch import PACKED_ARGUMENTS
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training import findings


class DeafAttention(LlamaAttention):
    """Attends to the whole row: it does not hear where packed sequences begin."""

    def forward(self, hidden_states, *args, **kwargs):
        deaf_to = (*PACKED_ARGUMENTS, "position_ids")  # which carry the arguments, for models that hand on nothing else
        kwargs = {name: value for name, value in kwargs.items() if name not in deaf_to}
        return super().forward(hidden_states, *args, **kwargs)


class ShiftingMLP(LlamaMLP):
    """Sees a tenth of the token before, as RWKV's token shift does."""

    def forward(self, x):
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().forward(x + 0.1 * before)


class ConvolvingMLP(LlamaMLP):
    """Sees the two tokens before through a convolution."""

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, x):
        return super().forward(self.conv(x.mT)[..., : x.shape[1]].mT)


class ColumnRotaryEmbedding(LlamaRotaryEmbedding):
    """Positions are columns."""

    def forward(self, x, position_ids):
        return super().forward(x, torch.arange(x.shape[1], device=x.device).expand_as(position_ids))


def deaf(layers=(0, 1)):
    def make():
        model = tiny_model("llama")
        for index in layers:
            weights = model.model.layers[index].self_attn.state_dict()
            model.model.layers[index].self_attn = DeafAttention(model.config, index)
            model.model.layers[index].self_attn.load_state_dict(weights)
        return model

    return make


def with_mlp(cls, layer=1):
    def make():
        model = tiny_model("llama")
        torch.manual_seed(0)
        model.model.layers[layer].mlp = cls(model.config)
        return model

    return make


def by_columns():
    model = tiny_model("llama")
    model.model.rotary_emb = ColumnRotaryEmbedding(model.config)
    return model


OWN = {
    "deaf": (deaf(), "DeafAttention"),
    "deaf-last": (deaf((1,)), "DeafAttention"),
    "shifting": (with_mlp(ShiftingMLP), "ShiftingMLP"),
    "convolving": (with_mlp(ConvolvingMLP), "ConvolvingMLP"),
    "by-columns": (by_columns, "ColumnRotaryEmbedding"),
}


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(findings.logger, "warning", messages.append)
    return messages


@pytest.mark.parametrize("name", OWN)
def test_modules_that_mix_tokens_train_as_in_stock(tmp_path, name, warnings):
    make_model, cls = OWN[name]
    fused, stock = make_pair(tmp_path, make_model)
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    assert fused.fused_layout() == "padded"
    (message,) = warnings
    assert f"{cls}, whose code is not known" in message


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "lfm2", "falcon-h1", "gpt-oss", "qwen3-vl"])
def test_a_model_that_keeps_sequences_apart_is_packed_in_bfloat16_too(tmp_path, kind, warnings):
    if kind in PADDING_MATTERS:
        pytest.skip("this transformers lets padding into its convolutions")
    fused, _ = make_pair(tmp_path, lambda: tiny_model(kind).to(torch.bfloat16))
    for seed in range(2):
        seeded(fused, short_rows(8, seed=seed))
    assert (fused.fused_layout(), warnings) == ("packed", [])


def under_autocast(tmp_path, make_model, **options):
    """A fused trainer with bfloat16 autocast over float32 weights, TRL's default on a GPU, after a micro-batch."""
    fused, _ = make_pair(tmp_path, make_model, shared={"bf16": True}, **options)
    fused.model = fused.accelerator.prepare(fused.model)  # as `train()` does: autocast is entered in its forward
    for seed in range(2):
        seeded(fused, short_rows(8, seed=seed))
    return fused


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt-oss", "qwen3-moe", "lfm2", "qwen3-vl"])
def test_under_autocast_sequences_that_stay_apart_are_packed(tmp_path, kind, warnings):
    if kind in PADDING_MATTERS:
        pytest.skip("this transformers lets padding into its convolutions")
    fused = under_autocast(tmp_path, lambda: tiny_model(kind))
    assert (fused.fused_layout(), warnings) == ("packed", [])
    assert not torch.is_autocast_enabled("cpu")


class HalfMLP(LlamaMLP):
    """Takes bfloat16 alone, as kernels do that others wrote."""

    def forward(self, x):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("half precision is needed")
        return super().forward(x)


def test_a_module_that_needs_autocast_has_it(tmp_path):
    assert under_autocast(tmp_path, with_mlp(HalfMLP)).fused_layout() == "padded"


def replace_attention(trainer):
    layers = trainer.model.model.layers
    weights = layers[0].self_attn.state_dict()
    layers[0].self_attn = DeafAttention(trainer.model.config, 0)
    layers[0].self_attn.load_state_dict(weights)


def change_class(trainer):
    trainer.model.model.layers[1].mlp.__class__ = ShiftingMLP


@pytest.mark.parametrize("change", [replace_attention, change_class])
def test_a_layer_that_is_replaced_in_a_training_is_seen(tmp_path, change):
    fused, stock = make_pair(tmp_path, lambda: tiny_model("llama"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    for trainer in (fused, stock):
        change(trainer)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "padded"


def test_a_function_that_is_replaced_in_a_training_is_seen(tmp_path, monkeypatch):
    fused, stock = make_pair(tmp_path, lambda: tiny_model("llama"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    rotate = modeling_llama.apply_rotary_pos_emb

    def grown(q, k, *args, **kwargs):
        q, k = rotate(q, k, *args, **kwargs)
        return q * (1 + 0.1 * torch.arange(q.shape[2])).unsqueeze(-1), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", grown)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "padded"


@pytest.mark.skipif("lfm2" in PADDING_MATTERS, reason="this transformers lets padding into LFM2's convolutions")
def test_a_state_layer_that_was_replaced_runs_on_rows_of_its_own(tmp_path, warnings):
    fused, stock = make_pair(tmp_path, lambda: tiny_model("lfm2"))
    assert_trains_as_stock(fused, stock, short_rows())
    for trainer in (fused, stock):
        layers = trainer.model.model.layers
        new = type(layers[0])(trainer.model.config, 0)
        new.load_state_dict(layers[0].state_dict())
        layers[0] = new
    assert_trains_as_stock(fused, stock, short_rows(seed=1))
    assert (fused.fused_layout(), warnings) == ("packed", [])
