"""The first batch of a model: packed rows are left where sequences do not stay apart in them, whatever the reason."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from tests.layout_pairs import assert_trains_as_stock, make_pair, seeded, short_rows
from trl_fused_grpo._compat.models import PADDING_MATTERS
from trl_fused_grpo.modeling.attention_watch import PACKED_ARGUMENTS
from trl_fused_grpo.modeling.unpacked_layers import unpacked_layers
from trl_fused_grpo.parity.tiny import model_config, tiny_model
from trl_fused_grpo.training import engine, trial, trial_precision


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


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(engine.logger, "warning", messages.append)
    return messages


@pytest.mark.parametrize("layers", [(0, 1), (0,), (1,)], ids=str)
def test_attention_that_ignores_sequence_boundaries_is_found_out(tmp_path, layers, warnings):
    fused, stock = make_pair(tmp_path, deaf(layers))
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    assert fused.fused_layout() == "aligned"
    (message,) = warnings
    assert "change when sequences share a row" in message


def test_packed_rows_that_were_asked_for_raise_with_the_reason(tmp_path):
    fused, _ = make_pair(tmp_path, deaf(), fused_layout="packed")
    with pytest.raises(RuntimeError, match="hidden states change when sequences share a row"):
        seeded(fused, short_rows())


def test_a_layer_that_sees_the_token_before_is_found_out(tmp_path, warnings):
    fused, stock = make_pair(tmp_path, with_mlp(ShiftingMLP))
    for _ in range(2):
        assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "aligned"
    (message,) = warnings
    assert "change when sequences share a row" in message


def test_a_convolution_of_the_users_own_runs_on_rows_of_its_own(tmp_path, warnings):
    fused, _ = make_pair(tmp_path, with_mlp(ConvolvingMLP))
    assert [type(layer) for layer in unpacked_layers(fused.model).with_state] == [ConvolvingMLP]
    seeded(fused, short_rows())
    assert not any("sequences share a row" in message for message in warnings)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "lfm2", "falcon-h1", "gpt-oss", "qwen3-vl"])
def test_a_model_that_keeps_sequences_apart_is_packed_in_bfloat16_too(tmp_path, kind, warnings):
    if kind in PADDING_MATTERS:
        pytest.skip("this transformers lets padding into its convolutions")
    fused, _ = make_pair(tmp_path, lambda: tiny_model(kind).to(torch.bfloat16))
    for seed in range(2):
        seeded(fused, short_rows(8, seed=seed))
    assert (fused.fused_layout(), warnings) == ("packed", [])


@pytest.mark.parametrize("layers", [(0, 1), (0,)], ids=str)
def test_attention_that_ignores_sequence_boundaries_is_found_out_in_bfloat16(tmp_path, layers):
    fused, _ = make_pair(tmp_path, lambda: deaf(layers)().to(torch.bfloat16))
    seeded(fused, short_rows())
    assert fused.fused_layout() == "aligned"


def under_autocast(tmp_path, make_model, **options):
    """A fused trainer with bfloat16 autocast over float32 weights, TRL's default on a GPU, after a micro-batch."""
    fused, _ = make_pair(tmp_path, make_model, shared={"bf16": True}, **options)
    fused.model = fused.accelerator.prepare(fused.model)  # as `train()` does: autocast is entered in its forward
    for seed in range(2):
        seeded(fused, short_rows(8, seed=seed))
    return fused


def test_what_autocast_rounds_away_is_found_out_in_float32(tmp_path, warnings):
    """A tenth of the token before: 0.2% of the hidden states, a quarter of a unit of bfloat16."""
    fused = under_autocast(tmp_path, with_mlp(ShiftingMLP))
    assert fused.fused_layout() == "aligned"
    (message,) = warnings
    assert "change when sequences share a row" in message


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


class HalfDeafAttention(DeafAttention):
    """The same of attention that ignores boundaries."""

    def forward(self, hidden_states, *args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("half precision is needed")
        return super().forward(hidden_states, *args, **kwargs)


@pytest.mark.parametrize(("cls", "layout"), [(HalfMLP, "packed"), (HalfDeafAttention, "aligned")])
def test_a_model_that_needs_autocast_is_tried_with_it(tmp_path, cls, layout, monkeypatch):
    told = []
    monkeypatch.setattr(trial_precision.logger, "info", told.append)

    def model():
        model = tiny_model("llama")
        layer = model.model.layers[0]
        (layer.mlp if cls is HalfMLP else layer.self_attn).__class__ = cls
        return model

    fused = under_autocast(tmp_path, model)
    assert fused.fused_layout() == layout
    assert "half precision is needed" in told[0]


def test_a_model_is_tried_out_once_in_evaluation_and_leaves_no_trace(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    model.model.layers[0].mlp.dropout = nn.Dropout(0.5)
    fused, _ = make_pair(tmp_path, lambda: model)
    modes, calls = [], []
    run = trial.run_model

    def spy(wrapped, *args):
        modes.append({module.training for module in wrapped.modules()})
        return run(wrapped, *args)

    monkeypatch.setattr(trial, "run_model", spy)
    for _ in range(2):
        seeded(fused, short_rows())
        calls.append(len(modes))
    assert calls == [6, 6]  # five sequences alone, and together
    assert modes == [{False}] * 6
    assert all(module.training for module in fused.model.modules())


def test_a_batch_that_cannot_tell_leaves_it_to_the_next(tmp_path, monkeypatch):
    fused, _ = make_pair(tmp_path, deaf())
    one = {name: value[:1] if torch.is_tensor(value) and value.dim() else value for name, value in short_rows().items()}
    one["completion_mask"] = torch.ones_like(one["completion_mask"])
    seeded(fused, one)
    assert fused.fused_layout() == "packed"  # a sequence alone stays apart
    seeded(fused, short_rows())
    assert fused.fused_layout() == "aligned"


def test_a_model_is_tried_out_anew_when_a_layer_was_replaced(tmp_path):
    fused, stock = make_pair(tmp_path, lambda: tiny_model("llama"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    for trainer in (fused, stock):
        layers = trainer.model.model.layers
        weights = layers[0].self_attn.state_dict()
        layers[0].self_attn = DeafAttention(trainer.model.config, 0)
        layers[0].self_attn.load_state_dict(weights)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "aligned"


class ColumnRotaryEmbedding(LlamaRotaryEmbedding):
    """Positions are columns."""

    def forward(self, x, position_ids):
        return super().forward(x, torch.arange(x.shape[1], device=x.device).expand_as(position_ids))


def test_positions_by_columns_are_found_out_where_sequences_share_a_prompt(tmp_path, warnings):
    """Attention knows distances alone: these are right but for a completion that stands far from its prompt."""

    def model():
        model = tiny_model("llama")
        model.model.rotary_emb = ColumnRotaryEmbedding(model.config)
        return model

    fused, stock = make_pair(tmp_path, model)
    for _ in range(2):
        assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "aligned"
    assert any("change when sequences share a row" in message for message in warnings)


@pytest.mark.parametrize("change", ["class", "function"])
def test_a_model_is_tried_out_anew_when_its_code_has_changed(tmp_path, change, monkeypatch):
    fused, stock = make_pair(tmp_path, lambda: tiny_model("llama"))
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    if change == "class":
        for trainer in (fused, stock):
            trainer.model.model.layers[1].mlp.__class__ = ShiftingMLP
    else:
        rotate = modeling_llama.apply_rotary_pos_emb

        def grown(q, k, *args, **kwargs):
            q, k = rotate(q, k, *args, **kwargs)
            return q * (1 + 0.1 * torch.arange(q.shape[2])).unsqueeze(-1), k

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", grown)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == ("aligned" if change == "class" else "padded")


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
