"""`FusedRLOOTrainer`: whole trainings against TRL's `RLOOTrainer`, from the same weights and with the same generation."""

import pytest
import torch
import trl
from trl import RLOOConfig, RLOOTrainer

from tests.tiny_training import make_inputs, make_trainer
from trl_fused_grpo import FusedRLOOConfig, FusedRLOOTrainer, fuse, fuse_config, patch


TIMES = ("runtime", "per_second", "step_time")
ON_POLICY = {"beta": 0.0, "gradient_accumulation_steps": 2, "max_steps": 3}


def train(folder, cls, peft_config=None, **options):
    """A training's trainer, how its weights moved, and what it logged without times."""
    torch.manual_seed(0)
    config = RLOOConfig if cls is RLOOTrainer else FusedRLOOConfig
    options = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 3, "seed": 3, **options}
    trainer = make_trainer(folder, cls, config=config, peft_config=peft_config, **options)
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    trainer.train()
    moved = {name: dict(trainer.model.named_parameters())[name].detach() - value for name, value in start.items()}
    log = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES) and not name.startswith("fused/")}
        for entry in trainer.state.log_history
    ]
    return trainer, moved, log


def test_now(tmp_path):
    stock, expected, expected_log = train(tmp_path, RLOOTrainer, **ON_POLICY)
    fused, moved, log = train(tmp_path, FusedRLOOTrainer, **ON_POLICY)
    print(expected_log)
    print(log)
    print(fused.state.log_history)
    for n in expected: print(n, (moved[n]-expected[n]).norm()/expected[n].norm())
