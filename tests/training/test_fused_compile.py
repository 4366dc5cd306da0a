"""A training with `fused_compile` is the training without."""

import os
from unittest import mock

import pytest
import torch
from trl import GRPOTrainer

from tests.compiler import traced_layers
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer


def trained(folder, **options):
    """What a training logs, and its weights."""
    # A step of SGD is as exact as its gradient
    options = {"optim": "sgd", "learning_rate": 0.1, **options}
    trainer = make_trainer(folder, max_steps=2, beta=0.04, gradient_checkpointing=True, **options)
    trainer.train()
    names = ("loss", "grad_norm", "kl", "entropy")
    logs = [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]
    return logs, {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.nightly
def test_weights_and_logs_are_those_without_it(tmp_path):
    expected = trained(tmp_path)
    with traced_layers() as calls:
        found = trained(tmp_path, fused_compile=True)
    assert calls["graphs"] > 0 == calls["eager"]
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for name, parameter in expected[1].items():
        torch.testing.assert_close(found[1][name], parameter, rtol=1e-5, atol=1e-5)


def test_it_is_off_by_default(tmp_path):
    with traced_layers() as calls:
        loss_and_gradients(make_trainer(tmp_path), make_inputs())
    assert not calls


@pytest.mark.parametrize("compiled", ["the model", "a layer", "a part of a layer"])
def test_what_the_user_compiles_trains_as_in_stock(tmp_path, caplog, compiled):
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled == "the model" else {}
    logs = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        torch._dynamo.reset()
        with mock.patch.dict(os.environ):  # where transformers says to every later trainer that models are compiled
            trainer = make_trainer(tmp_path, cls, max_steps=2, gradient_accumulation_steps=2, **options)
            layer = trainer.model.model.layers[0]
            if compiled != "the model":
                (layer if compiled == "a layer" else layer.mlp).compile(backend="eager")
            trainer.train()
        logs.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    stock, fused = logs
    assert fused == pytest.approx(stock, rel=1e-5)
    told = [message for message in caplog.messages if "the model, or a part of it, is compiled already" in message]
    assert len([message for message in told if message.startswith("Level head")]) == 1
