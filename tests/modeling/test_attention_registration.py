"""Transformers' attention and mask functions are replaced while a packed forward, or its backward, needs it only."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, short_rows
from trl_fused_grpo.modeling.attention.packed import uninstall_attention, watched_call
from trl_fused_grpo.modeling.attention.watch import WatchedCall
from trl_fused_grpo.parity.tiny import tiny_model


MASKS = ("sdpa", "eager", "flex_attention")


def registered():
    return AttentionInterface()["sdpa"], *(AttentionMaskInterface()[name] for name in MASKS)


STOCK = registered()


@pytest.fixture(autouse=True)
def transformers_own():
    """Before and after each test transformers' tables hold its own functions."""
    uninstall_attention()
    assert registered() == STOCK
    yield
    uninstall_attention()
    assert registered() == STOCK


def loss_of(trainer, inputs):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer.compute_loss(trainer.model, dict(inputs))


def test_stock_s_functions_are_transformers_own():
    assert STOCK[0] is sdpa_attention_forward


def test_the_functions_are_replaced_during_the_call_alone():
    with watched_call(WatchedCall()):
        assert not set(registered()) & set(STOCK)
    assert registered() == STOCK


def test_an_error_restores_them_too():
    with contextlib.suppress(RuntimeError), watched_call(WatchedCall()):
        raise RuntimeError
    assert registered() == STOCK


def test_a_call_within_a_call_leaves_them_to_the_outer_one():
    with watched_call(WatchedCall()):
        outer = registered()
        with watched_call(WatchedCall()):
            assert registered() == outer
        assert registered() == outer
    assert registered() == STOCK


def test_what_the_user_registers_during_a_call_stays():
    def own(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    with mock.patch.dict(AttentionInterface._global_mapping):
        with watched_call(WatchedCall()):
            AttentionInterface.register("sdpa", own)
        assert registered() == (own, *STOCK[1:])


def test_uninstalling_twice_is_uninstalling_once():
    with watched_call(WatchedCall()) as call:
        call.itself = call  # garbage that only the collector finds
    del call
    assert registered() != STOCK
    for _ in range(2):
        uninstall_attention()
        assert registered() == STOCK


def test_log_probs_and_losses_leave_transformers_as_it_was(tmp_path):
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)))
    log_probs(fused, short_rows())
    assert registered() == STOCK
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    assert registered() == STOCK


def drop_watched(monkeypatch):
    """Llama's backbone then gives its layers the sequences' boundaries, but not the watched call."""
    original = modeling_llama.LlamaModel.forward

    def forward(self, *args, watched=None, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)


CHECKPOINTS = {
    "lean": {"use_reentrant": False},
    "torch": {"use_reentrant": False, "determinism_check": "default"},
    "torch-reentrant": {"use_reentrant": True},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("drops_watched", [False, True], ids=["", "model-drops-watched"])
@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_layers_that_are_computed_again_attend_as_before(tmp_path, options, drops_watched, monkeypatch):
    if drops_watched:
        drop_watched(monkeypatch)
    layout = {"fused_layout": "packed"} if drops_watched else {}
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), **layout)
    for trainer in (fused, stock):
        trainer.model.gradient_checkpointing_enable(options)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"
    gc.collect()
    assert registered() == STOCK


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("kind", ["falcon-h1", "mamba2"])
def test_state_layers_are_computed_again_as_before(tmp_path, kind, options):
    fused, stock = make_pair(tmp_path, lambda: tiny_model(kind))
    for trainer in (fused, stock):
        trainer.model.gradient_checkpointing_enable(options)
    assert_trains_as_stock(fused, stock, short_rows())
    assert fused.fused_layout() == "packed"


def test_they_stay_replaced_while_a_checkpointed_graph_lives(tmp_path):
    fused, _ = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)))
    fused.model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = loss_of(fused, short_rows())
    uninstall_attention()
    assert registered() != STOCK
    with torch.no_grad():
        log_probs(fused, short_rows())
    assert registered() != STOCK
    loss.backward()
    del loss
    gc.collect()
    assert registered() == STOCK
