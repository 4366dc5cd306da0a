"""A training with `fused_compile` is the training without."""

import pytest
import torch

from tests.compiler import traced_layers
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer


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


def test_a_model_that_cannot_be_compiled_is_told_of_once(tmp_path, caplog):
    trainer = make_trainer(tmp_path, fused_compile=True)
    trainer.model.model.layers[0].mlp.compile(backend="eager")
    for _ in range(2):
        loss_and_gradients(trainer, make_inputs())
    told = [
        record.getMessage() for record in caplog.records if "fused_compile=True has no effect" in record.getMessage()
    ]
    assert len(told) == 1
    assert "the model, or a part of it, is compiled already" in told[0]
