"""Rows with TRL's padding: queries in padding, under which cuDNN's attention returns NaN, get keys to attend to."""

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.nn import functional
from trl import GRPOTrainer

from tests.code_of import as_code_of
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo._compat.required import TRANSFORMERS
from trl_fused_grpo.modeling.attention import padded as padded_attention
from trl_fused_grpo.training.checks import Check
from trl_fused_grpo.training.plan import why_padding_is_mixed_in


@pytest.fixture(autouse=True)
def with_cudnn():
    """As if there were a GPU."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    with mock.patch.object(torch.cuda, "is_initialized", return_value=True):
        yield
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def attention_calls():
    """Collects whether any query has no key, and whether cuDNN's attention is on, at every call of SDPA."""
    calls, original = [], functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **options):
        has_masked_queries = attn_mask is not None and not attn_mask.any(-1).all()
        calls.append((has_masked_queries, torch.backends.cuda.cudnn_sdp_enabled()))
        return original(query, key, value, attn_mask=attn_mask, **options)

    spy = as_code_of("torch.nn.functional", spy)
    with (
        mock.patch.object(functional, "scaled_dot_product_attention", spy),
        mock.patch.object(torch._C._nn, "scaled_dot_product_attention", spy),  # as if it were torch's own
    ):
        yield calls


def step(trainer, inputs):
    """Loss, gradients and attention calls of a training step, backward included."""
    trainer.model.train()
    trainer.model.zero_grad()
    if trainer.args.gradient_checkpointing:  # as `train` does
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.current_gradient_accumulation_steps = 1
    trainer._prepare_inputs = lambda examples: dict(inputs)
    with attention_calls() as calls, mock.patch.object(Check, "compare_logps"):
        loss = trainer.training_step(trainer.model, [], None)
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}, calls


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "falcon-h1", "lfm2"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_padded_queries_attend_to_something_and_change_nothing(tmp_path, kind, checkpointing):
    if kind in ("falcon-h1", "lfm2") and TRANSFORMERS.major < 5:
        pytest.skip("this transformers masks no query as a whole there, or lets padding into its convolutions")
    inputs = make_inputs(rows=4)
    options = {"kind": kind, "gradient_checkpointing": checkpointing}
    stock = make_trainer(tmp_path, GRPOTrainer, **options)
    expected_loss, expected, stock_calls = step(stock, inputs)
    assert any(has_masked_queries for has_masked_queries, _ in stock_calls)
    trainer = make_trainer(tmp_path, fused_layout="padded", **options)
    loss, gradients, calls = step(trainer, inputs)
    assert len(calls) == len(stock_calls)
    is_mixed_in = kind in ("falcon-h1", "lfm2")  # a state may take padding in, so that it matters what stands there
    assert set(calls) == {(True, False) if is_mixed_in else (False, True)}
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-7)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-6, name


def test_without_gradient_masks_stay_as_they_are(tmp_path):
    trainer = make_trainer(tmp_path, fused_layout="padded")
    with torch.no_grad(), attention_calls() as calls:
        trainer.compute_loss(trainer.model, make_inputs())
    assert set(calls) == {(True, True)}


def test_masks_that_a_model_builds_by_itself_keep_cudnn_off(tmp_path):
    """Nobody sees them: neither in the forward nor in the backward that computes layers again."""

    def own_mask(attention_mask, **_):
        width = attention_mask.shape[1]
        return torch.ones(width, width, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None]

    trainer = make_trainer(tmp_path, fused_layout="padded", gradient_checkpointing=True)
    file = "transformers.models.llama.modeling_llama"
    with mock.patch(f"{file}.create_causal_mask", as_code_of(file, own_mask)):
        _, _, calls = step(trainer, make_inputs())
    assert len(calls) == 4
    assert set(calls) == {(True, False)}


def test_padding_stays_masked_where_it_may_reach_a_sequence(tmp_path):
    trainer = make_trainer(tmp_path, fused_layout="padded")
    assert why_padding_is_mixed_in(trainer.model) is None
    layer = trainer.model.model.layers[0].mlp
    layer.__class__ = type("OwnMlp", (type(layer),), {})
    _, _, calls = step(trainer, make_inputs())
    assert set(calls) == {(True, True)}  # what code of the user's makes of it is as in stock
    stateful = make_trainer(tmp_path, kind="falcon-h1", fused_layout="padded")
    assert "state" in why_padding_is_mixed_in(stateful.model)
    _, _, calls = step(stateful, make_inputs())
    if TRANSFORMERS.major >= 5:  # before, no query is masked as a whole there
        assert set(calls) == {(True, False)}


def test_masks_of_other_kinds_stay_as_they_are():
    numbers = torch.zeros(1, 1, 2, 2)
    assert padded_attention.opened(None) is None
    assert padded_attention.opened(numbers) is numbers


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_after_a_failure_cudnn_is_as_before_and_nothing_of_the_forward_is_kept(tmp_path, layout):
    trainer = make_trainer(tmp_path, fused_layout=layout)
    errors = [RuntimeError("out of memory")]

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        raise errors[0]

    with (
        mock.patch.object(type(trainer.model.model), "forward", forward),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        loss_and_gradients(trainer, make_inputs())
    assert torch.backends.cuda.cudnn_sdp_enabled()
    kept = weakref.ref(forward)  # and with it the error, whose frames refer to all that there was
    errors.clear()
    del forward
    gc.collect()
    assert kept() is None
