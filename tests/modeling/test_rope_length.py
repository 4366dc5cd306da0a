"""Rotary factors that follow the longest position: TRL's padding decides them, in every layout."""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, short_rows
from tests.oracle import relative_error
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.rows import layout


def longrope():
    # Rows end within 8 positions, the padding after them
    name = "rope_type" if model_compat.TRANSFORMERS.major >= 5 else "type"
    scaling = {name: "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * i for i in range(8)]}
    return Phi3Config(
        **{**SHAPE, "max_position_embeddings": 16}, original_max_position_embeddings=8, rope_scaling=scaling
    )


def dynamic():
    return LlamaConfig(**{**SHAPE, "max_position_embeddings": 6}, rope_scaling={"rope_type": "dynamic", "factor": 4.0})


ROPES = {"longrope": longrope, "dynamic": dynamic}


@pytest.fixture(params=ROPES)
def make_model(request):
    return from_config(ROPES[request.param]())


@pytest.mark.sample(3)
@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("name", ["packed", "padded"])
def test_short_rows_train_what_stock_trains_on_padded_ones(tmp_path, make_model, name, shares):
    fused, stock = make_pair(tmp_path, make_model, fused_layout=name, fused_share_prompts=shares)
    assert_trains_as_stock(fused, stock, short_rows(4))
    assert_trains_as_stock(fused, stock, short_rows(8))
    assert_trains_as_stock(fused, stock, short_rows(1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["packed", "padded"])
def test_old_log_probs_by_sub_batches_are_stocks_and_those_of_training(tmp_path, make_model, name):
    fused, stock = make_pair(tmp_path, make_model, fused_layout=name)
    inputs = short_rows(4)
    expected = log_probs(stock, inputs, batch_size=2)
    old, training = log_probs(fused, inputs, batch_size=2), log_probs(fused, inputs, grad=True)
    assert relative_error(old, expected) < 1e-5
    assert relative_error(training, expected) < 1e-5


def test_the_padding_makes_a_difference_to_such_a_model(tmp_path, make_model):
    """Without it the tests above would show nothing."""
    _, stock = make_pair(tmp_path, make_model)
    inputs = short_rows(4)
    ids, mask = (
        torch.cat([inputs[prompt], inputs[completion][:, :4]], dim=1)
        for prompt, completion in (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
    )
    with torch.no_grad():  # before the longer ones: dynamic factors remember them
        truncated, *_ = stock._get_per_token_logps_and_entropies(stock.model, ids, mask, 4)
    truncated = truncated[inputs["completion_mask"][:, :4].bool()]
    assert relative_error(truncated, log_probs(stock, inputs)) > 1e-3


def test_one_token_stands_for_the_last_column_where_it_is_not_there(tmp_path, make_model, monkeypatch):
    seen = []
    monkeypatch.setattr(layout, "packed", lambda *args, _=layout.packed: seen.append(_(*args)) or seen[-1])
    fused, _ = make_pair(tmp_path, make_model, fused_share_prompts=False, fused_layout="packed")
    for longest in (4, 8):
        inputs = short_rows(longest)
        log_probs(fused, inputs, grad=True)
        counts = inputs["completion_mask"].any(1)
        tokens = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1))[counts].sum()
        position_ids = seen[-1].model_inputs["position_ids"]
        assert position_ids.max() == 10
        assert position_ids.shape[1] == tokens + (longest == 4)


def test_other_models_get_no_such_token(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(layout, "packed", lambda *args, _=layout.packed: seen.append(_(*args)) or seen[-1])
    fused, _ = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), fused_layout="packed")
    log_probs(fused, short_rows(4), grad=True)
    assert seen[-1].model_inputs["position_ids"].max() == 6


@pytest.mark.skipif(not trl_compat.RETURNS_AUX_LOSS, reason="this TRL has no auxiliary loss")
def test_the_auxiliary_loss_does_not_count_that_token(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **{**SHAPE, "max_position_embeddings": 6},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    )
    options = {"shared": {"router_aux_loss_coef": 0.5}}
    assert_trains_as_stock(*make_pair(tmp_path, from_config(config), **options), short_rows(4))


@pytest.mark.parametrize(
    ("rope_type", "follows"),
    [("default", False), ("yarn", False), ("dynamic", True), ("longrope", True), ("my_dynamic", True), (None, False)],
)
@pytest.mark.parametrize("by_layer_type", [False, True])
def test_the_rope_types_that_transformers_updates_are_known(rope_type, follows, by_layer_type):
    module = torch.nn.Module()
    module.rope_type = {"full_attention": "default", "sliding_attention": rope_type} if by_layer_type else rope_type
    assert model_compat.rope_follows_length(module) == follows
