"""Attention of more than causality and a window, and dropout: such models keep TRL's padding, and one line says so."""

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, LlamaConfig, Qwen3Config, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, seeded, short_rows
from tests.oracle import relative_error
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.tiny import VOCAB_SIZE
from trl_fused_grpo.training import findings


WINDOW = 3  # sequences have up to 11 tokens
SLIDING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def config_of(name, **options):
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    return cls(**{**SHAPE, **options})


# By name: how to make the configuration, and the layout that its model ends in
MASKED = {
    "doge": lambda: config_of("DogeConfig", keep_window_size=4, is_moe=False),
    "gemma3-bidirectional": lambda: config_of(
        "Gemma3TextConfig", head_dim=16, use_bidirectional_attention=True, sliding_window=WINDOW, layer_types=SLIDING
    ),
}
WINDOWED = {
    "phimoe": lambda: config_of(
        "PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, router_jitter_noise=0.0
    ),
    "qwen2-moe": lambda: config_of(
        "Qwen2MoeConfig", **EXPERTS, num_experts=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: config_of(
        "Qwen3Config", head_dim=16, use_sliding_window=True, sliding_window=WINDOW, layer_types=SLIDING
    ),
    "gemma3": lambda: config_of("Gemma3TextConfig", head_dim=16, sliding_window=WINDOW, layer_types=SLIDING),
    "mistral": lambda: config_of("MistralConfig", sliding_window=WINDOW),
}


@pytest.fixture
def warnings(monkeypatch):
    """What is told of levels."""
    messages = []
    monkeypatch.setattr(findings.logger, "warning", messages.append)
    return messages


# Some of these families return no router logits; the auxiliary loss is not what is looked at
NO_AUX_LOSS = {"router_aux_loss_coef": 0.0} if trl_compat.RETURNS_AUX_LOSS else {}


def is_packed(trainer):
    return trainer.fused_layout() == "packed"


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_more_than_causality_and_a_window_keeps_the_padding(tmp_path, name, warnings):
    fused, stock = make_pair(tmp_path, from_config(MASKED[name]()), NO_AUX_LOSS)
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(8, seed=seed))
    assert fused.fused_layout() == "padded"
    assert len(warnings) <= 1  # modules may say it beforehand


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_is_not_causal_is_not_packed(tmp_path, attention):
    make_model = from_config(MASKED["gemma3-bidirectional"](), attention)
    fused, stock = make_pair(tmp_path, make_model)
    assert_trains_as_stock(fused, stock, short_rows())
    with pytest.raises(ValueError, match="its attention is not causal"):
        make_pair(tmp_path, make_model, fused_layout="packed")


@pytest.mark.sample(4)
@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_is_heeded_in_packed_rows_wherever_it_stands(tmp_path, name, shares):
    fused, stock = make_pair(tmp_path, from_config(WINDOWED[name]()), NO_AUX_LOSS, fused_share_prompts=shares)
    assert_trains_as_stock(fused, stock, short_rows())
    is_old = model_compat.TRANSFORMERS.major < 5 and name in (
        "phimoe",
        "qwen2-moe",
    )  # its attention is not the interface's
    assert is_packed(fused) or is_old


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3", "phimoe"])
def test_a_window_is_heeded_when_checkpointed_layers_are_recomputed(tmp_path, name):
    fused, stock = make_pair(tmp_path, from_config(WINDOWED[name]()), {"gradient_checkpointing": True, **NO_AUX_LOSS})
    for trainer in (fused, stock):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_as_stock(fused, stock, short_rows())


class OwnMaskModel(modeling_llama.LlamaModel):
    """A token sees every second one before it."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        original = modeling_llama.create_causal_mask

        def create(**options):
            return original(**options, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0)

        modeling_llama.create_causal_mask = create
        try:
            return super().forward(input_ids, attention_mask, position_ids, **kwargs)
        finally:
            modeling_llama.create_causal_mask = original


def own_mask(attention="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE)
    config._attn_implementation = attention
    causal_lm = modeling_llama.LlamaForCausalLM(config)
    causal_lm.model = OwnMaskModel(config)
    return causal_lm


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_function_of_a_model_s_own_keeps_the_padding(tmp_path, attention, warnings):
    fused, stock = make_pair(tmp_path, lambda: own_mask(attention))
    for seed in range(2):
        assert_trains_as_stock(fused, stock, short_rows(seed=seed))
    assert fused.fused_layout() == "padded"
    (message,) = warnings
    assert "OwnMaskModel, whose code is not known" in message


def test_a_layout_that_was_asked_for_raises_instead(tmp_path):
    fused, _ = make_pair(tmp_path, own_mask, fused_layout="packed")
    with pytest.raises(ValueError, match="fused_layout='packed' does not fit this model: its mask is more"):
        seeded(fused, short_rows())


def gpt2(**options):
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2Config(**shape, **{**none, **options}, initializer_range=0.2, eos_token_id=1, bos_token_id=1)


def biogpt():
    options = {"num_key_value_heads": None, "layerdrop": 0.0, "hidden_dropout_prob": 0.0, "activation_dropout": 0.0}
    return config_of("BioGptConfig", **{**options, "attention_probs_dropout_prob": 0.1})


DROPOUTS = {
    "gpt2": lambda: gpt2(attn_pdrop=0.1),
    "gpt2-everywhere": lambda: gpt2(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "biogpt": biogpt,
    "llama": lambda: LlamaConfig(**SHAPE, attention_dropout=0.1),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_attention_dropout_draws_the_random_numbers_of_stock(tmp_path, name, warnings):
    fused, stock = make_pair(tmp_path, from_config(DROPOUTS[name]()))
    for seed in range(2):
        drawn, expected = assert_trains_as_stock(fused, stock, short_rows(seed=seed))
        assert drawn == expected
    if name == "biogpt" and model_compat.TRANSFORMERS.major < 5:
        return  # there it counts positions from the mask, which the first batch finds out before
    assert not warnings  # what is known before is no finding
    (line,) = [line for line in fused.fused_summary() if line.name == "packed rows"]
    assert line.reason == "its attention drops out"


def test_without_gradients_dropout_is_stocks_too(tmp_path):
    fused, stock = make_pair(tmp_path, from_config(DROPOUTS["gpt2"]()))
    drawn = []
    for trainer in (fused, stock):
        torch.manual_seed(0)
        drawn.append((log_probs(trainer, short_rows(), batch_size=2), torch.rand(())))
    assert relative_error(drawn[0][0], drawn[1][0]) < 1e-5
    assert drawn[0][1] == drawn[1][1]


def test_evaluation_of_such_a_model_is_packed_until_it_trains(tmp_path):
    fused, _ = make_pair(tmp_path, from_config(DROPOUTS["gpt2"]()))
    for is_training in (False, True):
        fused.model.train(is_training)
        assert is_packed(fused) is not is_training


def test_neftune_s_noise_is_stocks(tmp_path):
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)))
    for trainer in (fused, stock):
        embeddings = trainer.model.get_input_embeddings()
        embeddings.neftune_noise_alpha = 5.0
        embeddings.register_forward_hook(transformers.trainer.neftune_post_forward_hook) if hasattr(
            transformers.trainer, "neftune_post_forward_hook"
        ) else embeddings.register_forward_hook(transformers.integrations.neftune.neftune_post_forward_hook)
    drawn, expected = assert_trains_as_stock(fused, stock, short_rows(4))
    assert drawn == expected
    assert fused.fused_layout() == "padded"
    forced, _ = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), fused_layout="packed")
    forced.model.get_input_embeddings().neftune_noise_alpha = 5.0
    with pytest.raises(ValueError, match="NEFTune"):
        seeded(forced, short_rows())


def louder(module, query, key, value, *args, **kwargs):
    """An attention function of a user's own."""
    output, weights = ORIGINAL(module, query, key, value, *args, **{**kwargs, "scaling": 0.5})
    return 2 * output, weights


ORIGINAL = transformers.integrations.sdpa_attention.sdpa_attention_forward


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attention_function_that_the_user_registers_is_called(tmp_path, when, monkeypatch):
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)))
    if when == "before":
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", ORIGINAL)
    else:
        assert_trains_as_stock(fused, stock, short_rows())
        assert is_packed(fused)
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", AttentionInterface._global_mapping["sdpa"])
    AttentionInterface.register("sdpa", louder)
    assert_trains_as_stock(fused, stock, short_rows())
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is louder
    assert fused.fused_layout() == "padded"


def test_a_mask_function_that_the_user_registers_is_called(tmp_path, monkeypatch):
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)))
    mapping = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(mapping, "sdpa", mapping["sdpa"])

    def even(*args, mask_function, allow_is_causal_skip=True, **kwargs):
        own = masking_utils.and_masks(mask_function, lambda b, h, q, k: (q - k) % 2 == 0)
        return masking_utils.sdpa_mask(*args, mask_function=own, allow_is_causal_skip=False, **kwargs)

    AttentionMaskInterface.register("sdpa", even)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "padded"


def test_a_plain_model_stays_packed_and_nothing_is_said(tmp_path, warnings):
    fused, stock = make_pair(tmp_path, from_config(Qwen3Config(**SHAPE, head_dim=16)))
    assert_trains_as_stock(fused, stock, short_rows())
    assert is_packed(fused) and not warnings
