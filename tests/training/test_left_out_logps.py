"""Log-probs that generation leaves out. Computed later, the reference's equal those of an equal policy to the bit."""

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.distributed.rollouts import drawn
from tests.harness.customisations.rewards import reward_switches_adapter, with_two_adapters
from tests.layout_pairs import SHAPE, from_config
from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat.required import TRANSFORMERS
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest
from trl_fused_grpo.ops import linear_logps
from trl_fused_grpo.parity.tiny import save_checkpoint
from trl_fused_grpo.training import old_logps
from trl_fused_grpo.training.findings import Findings, Level


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

    return LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj"], **options})


@pytest.mark.sample(2)
@pytest.mark.parametrize("adapter", [False, True], ids=["reference-model", "lora"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused_max_tokens_per_forward": 10_000},
        {"fused_max_tokens_per_forward": 0},
        {"fused_layout": "padded"},
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_sampling_level": "sequence"},
        {"fused_backward": "recompute"},
        {"loss_type": "vespo"},
        {"fused_max_tokens_per_forward": 0},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "dapo",
)
@pytest.mark.parametrize("adapter", [None, ["q_proj"], ["q_proj", "lm_head"]], ids=["model", "lora", "lora-head"])
def test_the_reference_has_the_policys_chunks(tmp_path, monkeypatch, unchecked, options, adapter):
    """On CUDA their size depends on which gradients there are to build."""
    if "loss_type" in options and not hasattr(GRPOConfig, "vespo_k_pos"):
        pytest.skip("this TRL has no VESPO")
    sizes = {"forecast": 0.004, "frozen": 0.003}
    monkeypatch.setattr(linear_logps, "default_logits_mib", lambda _, head, mode, dtype: sizes.get(mode, 0.002))
    plans, plan_blocks = [], linear_logps.plan_blocks

    def plan(*args):
        blocks = plan_blocks(*args)
        plans.append((torch.is_grad_enabled(), [part for block in blocks for part in block.parts]))
        return blocks

    monkeypatch.setattr(linear_logps, "plan_blocks", plan)
    config = {} if adapter is None else {"peft_config": lora(target_modules=adapter)}
    train(tmp_path, max_steps=1, **options, **config)
    of_reference, of_policy = ([parts for has_grad, parts in plans if has_grad is mode] for mode in (False, True))
    assert of_policy == of_reference
    # With a ratio for each sequence all of them fit into one block here
    assert any(len(parts) > 1 for parts in of_policy) or (of_policy and "importance_sampling_level" in options)


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("beta", [0.0, 0.5], ids=["", "kl"])
@pytest.mark.skipif(Version("5.18.0") > TRANSFORMERS, reason="its experts do not run in stock")
def test_log_probs_of_rows_that_depend_on_one_another_come_from_generation(tmp_path, beta):
    """Doge's router mixes the tokens of a batch, and TRL shuffles the rows of a generation batch after its forwards."""
    from transformers import DogeConfig

    config = DogeConfig(**SHAPE, keep_window_size=6, is_moe=True, num_experts=16, num_experts_per_tok=4)
    from_config(config)().save_pretrained(tmp_path / "model")
    options = {"beta": beta, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "router_aux_loss_coef": 0.0}
    options |= {"model": str(tmp_path / "model"), "max_steps": 3, "optim": "sgd", "learning_rate": 0.01}
    (_, expected, stock_log), (_, weights, log) = [
        train(tmp_path, cls, **options) for cls in (GRPOTrainer, FusedGRPOTrainer)
    ]
    for name, weight in expected.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    for entry, stock_entry in zip(log, stock_log, strict=True):
        assert entry["loss"] == pytest.approx(stock_entry["loss"], rel=1e-4, abs=1e-7)


def test_the_log_says_that_a_reward_function_leaves_the_model_in_evaluation(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=4)

    def evaluates(completions, **_):
        trainer.model.eval()
        return [float(len(completion) % 5) for completion in completions]

    trainer.reward_funcs = [evaluates]
    trainer.train()
    (message,) = [message for message in caplog.messages if "a generation has left the model in evaluation" in message]
    assert message.startswith("Level rows (")


def test_the_log_says_that_a_reward_function_leaves_other_adapters_on(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    messages = []
    monkeypatch.setattr(old_logps.logger, "warning_once", messages.append, raising=False)
    model = with_two_adapters(save_checkpoint("llama", tmp_path, torch.float32))
    trainer = make_trainer(tmp_path, model=model, max_steps=1, steps_per_generation=2, gradient_accumulation_steps=1)
    reward_switches_adapter(trainer)
    trainer.train()
    assert messages == [
        "Old log-probs have a forward of their own, because other adapters are on than when TRL asked for them."
    ]


def test_a_frozen_weight_that_a_reward_function_moves_counts(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, num_iterations=2, peft_config=lora())

    def moves(completions, **_):
        with torch.no_grad():
            trainer.model.get_base_model().model.norm.weight.mul_(1.1)
        return [float(len(completion) % 5) for completion in completions]

    trainer.reward_funcs = [moves]
    trainer.train()
    assert trainer._fused.ladder.level == Level.ROWS
    assert "a reward function has changed the model" in trainer._fused.ladder.findings.reasons[0].text


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"num_iterations": 2, "beta": 0.0}, {"beta": 0.5}], ids=["old", "reference"])
def test_log_probs_come_from_generation_once_a_reward_function_moves_weights(tmp_path, caplog, options):
    results = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        holder: list[GRPOTrainer] = []

        def moves(completions, holder=holder, **_):
            (trainer,) = holder
            with torch.no_grad():
                for model in filter(None, (trainer.model, trainer.ref_model)):
                    model.get_output_embeddings().weight.mul_(0.9)
            return [float(len(completion) % 5) for completion in completions]

        own = {"max_steps": 4, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, **options}
        trainer = make_trainer(tmp_path, cls, **own)
        trainer.reward_funcs = [moves]
        holder.append(trainer)
        caplog.clear()
        trainer.train()
        results.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    stock, fused = results
    assert max(relative_error(fused[name], weight) for name, weight in stock.items()) < 1e-5
    told = [message for message in caplog.messages if message.startswith("Level ")]
    assert len(told) == 1 and "a reward function has changed the model" in told[0]
    assert trainer._fused.ladder.level == Level.ROWS


class Hooking(TrainerCallback):
    """A reward function that hooks the model, and takes the hook off after each step: no generation begins with it."""

    __name__ = "hooking"

    def __init__(self, trainer, first):
        self.trainer, self.first, self.generations, self.handles = trainer, first, itertools.count(), []
        trainer.reward_funcs = [self]
        trainer.add_callback(self)

    def __call__(self, completions, **kwargs):
        if next(self.generations) >= self.first:
            layer = self.trainer.model.model.layers[0].mlp
            self.handles.append(layer.register_forward_hook(lambda module, args, output: output * 0.5))
        return [float(len(completion) % 5) for completion in completions]

    def on_step_end(self, *args, **kwargs):
        while self.handles:
            self.handles.pop().remove()


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"beta": 0.5}, {}], ids=["old", "reference", "vllm"])
def test_log_probs_come_from_generation_once_a_reward_function_hooks_the_model(tmp_path, caplog, options):
    norms = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = make_trainer(tmp_path, cls, max_steps=6, learning_rate=0.0, **options)
        Hooking(trainer, first=0)
        if not options:
            use_sampler(trainer)
        caplog.clear()
        trainer.train()
        norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    stock, fused = norms
    assert fused == pytest.approx(stock, rel=1e-5)
    assert "a reward function has changed the model" in caplog.text
    assert "that a reward function has changed" not in caplog.text


def test_one_that_begins_later_is_told_with_what_it_has_changed(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=6, num_iterations=2)
    Hooking(trainer, first=1)
    trainer.train()
    assert caplog.text.count("Log-probs of this generation batch, which were to come from its training, are those") == 1
    assert trainer._fused.ladder.level <= Level.ROWS


@pytest.mark.parametrize("adapters", [["default"], ["default", "ref"]], ids=["base", "adapter"])
def test_adapters_that_are_off_for_the_reference_are_not_taken_for_moved_weights(tmp_path, caplog, adapters):
    """Each of PEFT's switches decides anew which weights ask for gradients."""
    trainer = make_trainer(tmp_path, max_steps=3, beta=0.5, num_iterations=2, peft_config=lora())
    for name in set(adapters) - set(trainer.model.peft_config):
        trainer.model.add_adapter(name, lora())
    trainer.train()
    assert "a reward function has changed the model" not in caplog.text
    assert trainer._fused.look() == Findings()


def projected_for_the_reference(trainer) -> tuple[list[int], list[int]]:
    """
    Train on-policy, so that forwards without gradient are the reference's. The tokens that count in each generation
    batch, and the rows that each of these forwards projects.
    """
    tokens, projected = [], []
    plan, run = trainer._fused.plan, FusedRequest.__call__

    def planned(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        tokens.append(sum(int(batch["completion_mask"].sum()) for batch in batches))
        return plan(batches)

    def counted(request: FusedRequest, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            projected.append(len(request.positions))
        return run(request, *args, **kwargs)

    trainer._fused.plan = planned
    with mock.patch.object(FusedRequest, "__call__", counted):
        trainer.train()
    return tokens, projected


@pytest.mark.sample(2)
@pytest.mark.parametrize("truncated", ["some", "all"])
@pytest.mark.parametrize(("layout", "adapter"), [("packed", False), ("packed", True), ("padded", False)])
def test_the_reference_projects_no_row_of_a_masked_completion(tmp_path, unchecked, layout, adapter, truncated):
    """A truncated completion has no loss here, so nobody reads its KL."""
    options: dict[str, Any] = {"peft_config": lora()} if adapter else {}
    options |= {"generation_kwargs": {"min_new_tokens": 8}} if truncated == "all" else {}
    options |= {"beta": 0.5, "max_steps": 2, "gradient_accumulation_steps": 2, "fused_layout": layout}
    trainer = make_trainer(tmp_path, mask_truncated_completions=True, **options)
    with drawn(trainer.processing_class, reads_model=False) if truncated == "some" else nullcontext():
        tokens, projected = projected_for_the_reference(trainer)
    assert sum(projected) == sum(tokens)
    shares = [entry["completions/clipped_ratio"] for entry in trainer.state.log_history if "kl" in entry]
    assert len(shares) == len(tokens) == 2
    for share, count in zip(shares, tokens, strict=True):
        assert (0 < share < 1 and count > 0) if truncated == "some" else (share == 1 and count == 0)
