"""Whole trainings with models that do not take every layout: stock's weights, losses and random numbers."""

import pytest
import torch
from transformers import LlamaConfig
from trl import GRPOTrainer

from tests.layout_pairs import SHAPE, from_config
from tests.oracle import relative_error
from tests.tiny_training import make_trainer

from .test_layout_refusals import gpt2, own_mask
from .test_rope_length import longrope


OPTIONS = {"max_steps": 3, "gradient_accumulation_steps": 4, "optim": "sgd", "learning_rate": 0.1}
# By name: the model, and options
TRAININGS = {
    "dropout": (from_config(gpt2(attn_pdrop=0.1, resid_pdrop=0.1)), {}),
    "dropout-off-policy": (from_config(gpt2(attn_pdrop=0.1)), {"num_iterations": 2}),
    "own-mask": (own_mask, {}),
    "longrope": (from_config(longrope()), {"num_iterations": 2}),
    "neftune": (from_config(LlamaConfig(**SHAPE)), {"neftune_noise_alpha": 5.0}),
}


def trained(tmp_path, cls=None, make_model=None, **options):
    trainer = make_trainer(tmp_path, **({"cls": cls} if cls else {}), model=make_model(), **OPTIONS, **options)
    torch.manual_seed(0)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return dict(trainer.model.named_parameters()), log, torch.rand(())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_ends_in_stocks_weights(tmp_path, name):
    make_model, options = TRAININGS[name]
    expected, expected_log, expected_drawn = trained(tmp_path, GRPOTrainer, make_model, **options)
    weights, log, drawn = trained(tmp_path, make_model=make_model, fused_max_tokens_per_forward=10_000, **options)
    assert drawn == expected_drawn
    for parameter, weight in expected.items():
        assert relative_error(weights[parameter], weight) < 1e-5, parameter
    for entry, stocks in zip(log, expected_log, strict=True):
        for metric in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean"):
            assert entry[metric] == pytest.approx(stocks[metric], rel=1e-4, abs=1e-6), metric
