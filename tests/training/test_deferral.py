"""Log-probs that generation leaves out. Computed later, the reference's equal those of an equal policy to the bit."""

import pytest
import torch
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer


def train(tmp_path, cls=FusedGRPOTrainer, reward=None, **options):
    """Train for two steps under AdamW; the weights before and after, and what was logged."""
    options = {"max_steps": 2, "beta": 0.5, "gradient_accumulation_steps": 4, "learning_rate": 1e-2, **options}
    trainer = make_trainer(tmp_path, cls, **options)
    if reward is not None:
        trainer.reward_funcs = [reward]
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return start, weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def lora(**options):
    pytest.importorskip("peft")
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize("adapter", [False, True], ids=["reference-model", "lora"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused_max_tokens_per_forward": 10_000},
        {"fused_max_tokens_per_forward": 0},
        {"fused_layout": "aligned"},
        {"fused_logits_mib": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=lambda options: "-".join(map(str, options)) or "packed",
)
def test_a_policy_that_is_its_reference_does_not_move_without_advantages(tmp_path, options, adapter):
    """The gradient of KL is exactly zero then, as in stock. Adam would make whole steps of a rounding error."""
    config = {"peft_config": lora()} if adapter else {}
    start, weights, log = train(tmp_path, reward=lambda completions, **_: [1.0] * len(completions), **options, **config)
    assert all(torch.equal(weights[name], start[name]) for name in start)
    assert [entry["kl"] for entry in log] == [0.0, 0.0]


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("adapter", [False, True], ids=["reference-model", "lora"])
def test_a_reference_computed_in_the_policys_forwards_trains_what_stock_trains(tmp_path, adapter, iterations):
    options = {"num_iterations": iterations, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    runs = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        config = {"peft_config": lora(init_lora_weights=False)} if adapter else {}
        torch.manual_seed(0)
        runs.append(train(tmp_path, cls, **options, **config))
    (_, expected, stock_log), (_, weights, log) = runs
    for name, weight in expected.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    for entry, stock_entry in zip(log, stock_log, strict=True):
        assert entry["kl"] == pytest.approx(stock_entry["kl"], rel=1e-4, abs=1e-7)
