"""Layouts of the rows: stock's loss and gradients whatever the lengths, and refused where they do not fit."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config
from trl import GRPOTrainer

from tests.layout_pairs import log_probs
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.rows import layout
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config
from trl_fused_grpo.training import engine


LAYOUTS = ["packed", "padded"]


def every_length(**extra):
    """Rows of 0 to 8 completion tokens, prompts of 1 to 4."""
    inputs = make_inputs(rows=9, **extra)
    inputs["completion_mask"] = (torch.arange(8) < torch.arange(9)[:, None]).long()
    lengths = torch.arange(9) % 3 + 1
    inputs["prompt_mask"] = (torch.arange(3) >= 3 - lengths[:, None]).long()
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def with_repeated_prompts(inputs):
    """The same micro-batch with three prompts, of which one has completions on both sides of another's."""
    prompt = torch.tensor([0, 1, 0, 1, 1, 2, 2, 2, 0])
    for name in ("prompt_ids", "prompt_mask"):
        inputs[name] = inputs[name][prompt]
    return inputs


def assert_same(trainer, stock, inputs, tolerance=1e-5):
    loss, gradients = loss_and_gradients(trainer, inputs)
    expected_loss, expected = loss_and_gradients(stock, inputs)
    assert relative_error(loss, expected_loss) < tolerance
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < tolerance, name


@pytest.mark.parametrize("old_logps", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_trains_what_stock_trains(tmp_path, name, old_logps):
    inputs = every_length()
    if old_logps:
        inputs["old_per_token_logps"] = torch.full((9, 8), -6.9)
    assert_same(make_trainer(tmp_path, fused_layout=name), make_trainer(tmp_path, GRPOTrainer), inputs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_under_gradient_checkpointing(tmp_path, name, monkeypatch):
    trainer = make_trainer(tmp_path, fused_layout=name, gradient_checkpointing=True)
    calls = []
    checkpointed = torch.utils.checkpoint.checkpoint
    counted = lambda *args, **kwargs: calls.append(args) or checkpointed(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(trainer, make_trainer(tmp_path, GRPOTrainer), every_length())
    assert len(calls) == trainer.model.config.num_hidden_layers


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "tied", "moe"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient-checkpointing"])
def test_a_prompt_that_completions_share_trains_what_its_copies_train(tmp_path, kind, checkpointing):
    trainer = make_trainer(tmp_path, kind=kind, gradient_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = with_repeated_prompts(every_length(old_per_token_logps=torch.full((9, 8), -6.9)))
    assert_same(trainer, make_trainer(tmp_path, GRPOTrainer, kind=kind), inputs)


def test_packed_rows_hold_a_shared_prompt_once(tmp_path, monkeypatch):
    seen, tokens = [], []
    monkeypatch.setattr(layout, "packed", lambda *args, _=layout.packed: seen.append(_(*args)) or seen[-1])
    inputs = with_repeated_prompts(every_length())
    for shares in (True, False):
        loss_and_gradients(make_trainer(tmp_path, fused_share_prompts=shares), inputs)
        tokens.append(seen[-1].model_inputs["input_ids"].shape[1])  # after the trial of the model's first batch
    lengths, counts = inputs["prompt_mask"].sum(1), inputs["completion_mask"].any(1)
    once, each = lengths[[1, 2, 5]].sum(), lengths[counts].sum()
    assert tokens == [inputs["completion_mask"].sum() + prompts for prompts in (once, each)]


def test_the_auxiliary_loss_sees_every_copy_of_a_prompt(tmp_path):
    if not trl_compat.RETURNS_AUX_LOSS:
        pytest.skip("this TRL has no auxiliary loss")
    options = {"kind": "moe", "router_aux_loss_coef": 0.5}
    fused, stock = make_trainer(tmp_path, **options), make_trainer(tmp_path, GRPOTrainer, **options)
    assert_same(fused, stock, with_repeated_prompts(every_length()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_each_layout_on_other_models(tmp_path, name, kind):
    assert_same(
        make_trainer(tmp_path, kind=kind, fused_layout=name),
        make_trainer(tmp_path, GRPOTrainer, kind=kind),
        every_length(),
    )


@pytest.mark.parametrize("repeated", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_respects_sliding_windows(tmp_path, name, repeated):
    config = model_config("tied").to_dict()
    config.update(use_sliding_window=True, sliding_window=3, max_window_layers=0, layer_types=["sliding_attention"] * 2)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(Qwen3Config(**config), attn_implementation="sdpa"))
    fused, stock = (
        make_trainer(tmp_path, model=models[0], fused_layout=name),
        make_trainer(tmp_path, GRPOTrainer, model=models[1]),
    )
    inputs = every_length()
    assert_same(fused, stock, with_repeated_prompts(inputs) if repeated else inputs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_models_with_absolute_positions_get_those_of_trl_s_padding(tmp_path, name):
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config))
    fused, stock = (
        make_trainer(tmp_path, model=models[0], fused_layout=name),
        make_trainer(tmp_path, GRPOTrainer, model=models[1]),
    )
    assert_same(fused, stock, with_repeated_prompts(every_length()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("repeated", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_by_sub_batches_come_back_in_order(tmp_path, name, repeated):
    trainer, stock = make_trainer(tmp_path, fused_layout=name), make_trainer(tmp_path, GRPOTrainer)
    inputs = with_repeated_prompts(every_length()) if repeated else every_length()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        found, expected = (
            t._get_per_token_logps_and_entropies(t.model, ids, mask, 8, batch_size=2, compute_entropy=True)
            for t in (trainer, stock)
        )
    keep = inputs["completion_mask"].bool()
    for mine, other in zip(found[:2], expected[:2], strict=True):
        assert relative_error(mine[keep], other[keep]) < 1e-5


def test_packed_rows_hold_no_padding_and_no_sequence_without_tokens_in_the_loss(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, fused_layout="packed")
    seen = []
    monkeypatch.setattr(layout, "packed", lambda *args, _=layout.packed: seen.append(_(*args)) or seen[-1])
    inputs = every_length()
    loss_and_gradients(trainer, inputs)
    counts = inputs["completion_mask"].any(1)
    tokens = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1))[counts].sum()
    assert seen[-1].model_inputs["input_ids"].shape == (1, tokens)


def test_attention_gets_no_mask_and_takes_its_causal_path(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, fused_layout="packed")
    calls = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append((kwargs.get("attn_mask"), kwargs["is_causal"]))
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    loss_and_gradients(trainer, every_length())
    assert set(calls) == {(None, True)}


def test_a_layout_that_the_model_cannot_take_is_refused_with_the_reason(tmp_path):
    model = AutoModelForCausalLM.from_config(model_config("llama"), attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="attn_implementation='flex_attention' knows no sequence boundaries"):
        make_trainer(tmp_path, model=model, fused_layout="packed")


def test_generation_still_works_after_packed_training(tmp_path):
    trainer = make_trainer(tmp_path, fused_layout="packed")
    ids = torch.tensor([[5, 6, 7], [0, 6, 7]])
    call = {"attention_mask": (ids > 0).long(), "max_new_tokens": 5, "do_sample": False}
    before = trainer.model.eval().generate(ids, **call)
    loss_and_gradients(trainer, every_length())
    assert torch.equal(trainer.model.eval().generate(ids, **call), before)


def test_a_layout_is_chosen_once_a_call(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, fused_layout="packed")
    reasons, why_not_packed = [], engine.why_not_packed
    monkeypatch.setattr(engine, "why_not_packed", lambda *args: reasons.append(why_not_packed(*args)) or reasons[-1])
    log_probs(trainer, make_inputs())
    assert reasons == [None]
