"""A training with `fused_compile` is the training without."""

import logging

import pytest
import torch

from tests.distributed.compiled import compiled_calls
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo.modeling import compiled_modules


pytestmark = pytest.mark.ends


@pytest.fixture(autouse=True)
def quiet_compiler(monkeypatch):
    """The compiler's log, which pytest would keep, takes most of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


def trained(folder, **options):
    """What a training logs, and its weights."""
    # A step of SGD is as exact as its gradient
    options = {"optim": "sgd", "learning_rate": 0.1, **options}
    trainer = make_trainer(folder, max_steps=2, beta=0.04, gradient_checkpointing=True, **options)
    trainer.train()
    assert not [
        name for name, module in trainer.model.named_modules() if hasattr(vars(module).get("forward"), "change")
    ]
    names = ("loss", "grad_norm", "kl", "entropy")
    logs = [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]
    return logs, {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def test_weights_and_logs_are_those_without_it(tmp_path):
    expected = trained(tmp_path)
    with compiled_calls() as calls:
        found = trained(tmp_path, fused_compile=True)
    assert "eager" not in calls
    assert {"LlamaRMSNorm", "LlamaMLP", "modeling_llama_apply_rotary_pos_emb"} <= calls.keys()
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for name, parameter in expected[1].items():
        torch.testing.assert_close(found[1][name], parameter, rtol=1e-5, atol=1e-5)


def test_it_is_off_by_default(tmp_path):
    with compiled_calls() as calls:
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
    assert "a part of the model is compiled already" in told[0]
    assert compiled_modules.compiled_parts(trainer.model).forwards == []
