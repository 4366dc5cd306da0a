"""A trainer that runs several batches gives for each what a new one gives."""

import pytest
import torch

from tests.harness.random_cases import random_case
from tests.harness.steps import fused_trainer, make_data, run_steps, stock_trainer
from trl_fused_grpo._compat.trl import TRL
from trl_fused_grpo.parity.run_case import Restarted
from trl_fused_grpo.parity.trainers import Settings, load_weights, noisy_weights


# The run ends within a generation batch, after the weights moved
WITHIN_GENERATION = '"rollout":true,"rows":4,"group":2,"gradient_accumulation_steps":2,"steps_per_generation":6'
ADAPTIVE = '"use_adaptive_entropy":true,"entropy_coef":0.1,"entropy_target":5.0'


@pytest.mark.sample(2)
@pytest.mark.any_trl
@pytest.mark.parametrize("build", [stock_trainer, fused_trainer])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(f'{{{WITHIN_GENERATION},"accumulation_windows":2,"update":true}}', id="within-a-generation"),
        pytest.param(
            f"{{{ADAPTIVE}}}",
            id="adaptive-entropy",
            marks=pytest.mark.skipif(TRL.release < (1, 8), reason="TRL >= 1.8 has the entropy bonus"),
        ),
    ],
)
def test_a_restarted_trainer_runs_as_a_new_one_does(tmp_path, build, options):
    case, settings = random_case(f"random:{options}"), Settings(tmp_path)
    stock = stock_trainer(case, settings)
    start = noisy_weights(stock, case.noise)
    restarted = Restarted(build(case, settings), start)
    for seed in (1, 2):
        data = make_data(case, load_weights(stock, start), seed)
        expected = run_steps(load_weights(build(case, settings), start), case, data, torch.float32)
        outcome = run_steps(restarted(), case, data, torch.float32)
        assert (outcome.loss, outcome.metrics) == (expected.loss, expected.metrics)
        assert all(torch.equal(outcome.tensors[name], tensor) for name, tensor in expected.tensors.items())
