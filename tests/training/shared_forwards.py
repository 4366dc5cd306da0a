"""Trainings whose micro-batches may share a forward, with the shapes of their forwards."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest


PLENTY = 10_000


def train(tmp_path, cls=FusedGRPOTrainer, **options):
    """Train on what the model generates; weights, logs, and the shape of the input of every forward with gradient."""
    options = {"max_steps": 2, "gradient_accumulation_steps": 4, "optim": "sgd", "learning_rate": 0.1, **options}
    trainer = make_trainer(tmp_path, cls, **options)
    forwards = []
    if cls is GRPOTrainer:

        def count(module, args, output):
            if torch.is_grad_enabled():
                forwards.append(output.shape[:2])

        trainer.model.get_input_embeddings().register_forward_hook(count)
        trainer.train()
    else:
        with fused_forwards(forwards):  # with a hook on the model each micro-batch would run alone
            trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry], forwards


@contextmanager
def fused_forwards(shapes):
    """Collects the shape of the input of every fused forward with gradient."""
    original = FusedRequest.__call__

    def spy(self, causal_lm, **model_inputs):
        if torch.is_grad_enabled():
            shapes.append(model_inputs["input_ids"].shape)
        return original(self, causal_lm, **model_inputs)

    with mock.patch.object(FusedRequest, "__call__", spy):
        yield


def assert_same_training(fused, stock, metrics=("loss", "grad_norm")):
    (weights, log, _), (expected, expected_log, _) = fused, stock
    for name, weight in expected.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    for entry, stock_entry in zip(log, expected_log, strict=True):
        for name in metrics:
            assert entry[name] == pytest.approx(stock_entry[name], rel=1e-4, abs=1e-6), name
        assert entry.keys() - stock_entry.keys() <= {"fused/rows_recomputed"}
