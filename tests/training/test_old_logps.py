"""Old log-probs of generation batches that are trained on while the weights move."""

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest

from .sampler import use_sampler


pytestmark = [pytest.mark.any_trl, pytest.mark.usefixtures("unchecked")]

# Micro-batches of a window and of a generation batch, and how often this is trained on
SCHEDULES = {
    "two windows": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "windows that do not fit": {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
    "two iterations": {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2},
    "two iterations of two windows": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
    },
}
SAMPLERS = ["no vLLM", "token_truncate", "sequence_mask", "no correction"]


def trainer_of(folder, cls=FusedGRPOTrainer, sampler="no vLLM", **options):
    """A trainer whose weights move enough for ratios to matter."""
    defaults = {"max_steps": 6, "optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 1e9, "max_completion_length": 8}
    if sampler in ("token_truncate", "sequence_mask"):
        defaults["vllm_importance_sampling_mode"] = sampler
    if sampler == "no correction":
        defaults["vllm_importance_sampling_correction"] = False
    trainer = make_trainer(folder, cls, **{**defaults, **options})
    if sampler != "no vLLM":
        use_sampler(trainer)
    return trainer


def train(trainer):
    """The weights after a training, and what was logged."""
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.fixture
def forwards(monkeypatch):
    """Of each forward of a fused trainer, whether it had gradients, and how many rows it projected."""
    seen: list[tuple[bool, int]] = []
    call = FusedRequest.__call__

    def spy(self, causal_lm, **model_inputs):
        seen.append((torch.is_grad_enabled(), len(self.positions)))
        return call(self, causal_lm, **model_inputs)

    monkeypatch.setattr(FusedRequest, "__call__", spy)  # a hook on the model would turn faster paths off
    return seen


def assert_same(results, expected):
    (weights, log), (stock_weights, stock_log) = results, expected
    for name, weight in stock_weights.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    assert len(log) == len(stock_log)
    for entry, stock_entry in zip(log, stock_log, strict=True):
        names = stock_entry.keys() - {"fused/rows_recomputed"}
        assert entry.keys() - {"fused/rows_recomputed"} == names
        for name in names - {"step_time"}:
            assert entry[name] == pytest.approx(stock_entry[name], rel=2e-4, abs=1e-6), name


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "own", [{}, {"fused_layout": "padded"}, {"fused_skip_old_logps": False}], ids=["packed", "padded", "computed"]
)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_trains_and_logs_as_stock(tmp_path, schedule, sampler, own):
    """Vllm's metrics stand in the entry of the step that generated, also where some ratios come from its training."""
    options = {"sampler": sampler, **SCHEDULES[schedule]}
    expected = train(trainer_of(tmp_path, GRPOTrainer, **options))
    assert_same(train(trainer_of(tmp_path, **own, **options)), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_forward_of_their_own_is_left_to_what_is_trained_on_with_other_weights(tmp_path, forwards, schedule, sampler):
    options = SCHEDULES[schedule]
    trainer = trainer_of(tmp_path, sampler=sampler, **options)
    later: list[int] = []
    plan = trainer._fused.plan

    def planned(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        steps_left = trainer._fused.window.steps_left
        later.append(sum(int(batch["completion_mask"].sum()) for batch in batches[steps_left:]))
        return plan(batches)

    with mock.patch.object(trainer._fused, "plan", planned):
        trainer.train()
    assert sum(rows for has_gradient, rows in forwards if not has_gradient) == sum(later)
    assert (sum(later) > 0) == (schedule != "two iterations")


def test_switched_off_they_all_have_a_forward_of_their_own_and_train_the_same(tmp_path, forwards):
    options = SCHEDULES["two iterations of two windows"]
    expected = train(trainer_of(tmp_path, **options))
    few = sum(rows for has_gradient, rows in forwards if not has_gradient)
    forwards.clear()
    assert_same(train(trainer_of(tmp_path, fused_skip_old_logps=False, **options)), expected)
    assert sum(rows for has_gradient, rows in forwards if not has_gradient) > 1.5 * few


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"fused_max_tokens_per_forward": 0},
        {"fused_max_tokens_per_forward": 10_000},
        {"fused_skip_old_logps": False},
    ],
    ids=["default", "alone", "one forward", "computed"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_that_do_not_move_have_a_ratio_of_exactly_one_in_bfloat16(tmp_path, schedule, own, sampler):
    """
    As in stock. Two forwards of one policy round differently where their rows differ, and a ratio of a sequence
    multiplies all of its tokens' differences.
    """
    trainer = trainer_of(
        tmp_path,
        sampler=sampler,
        kind="qwen3",
        learning_rate=0.0,
        **own,
        model_init_kwargs={"dtype": "bfloat16"},
        **SCHEDULES[schedule],
    )
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.3 * torch.randn_like(weight)  # new weights are so small that little is rounded
    differences: list[float] = []
    fill = trainer._fused.old_logps.fill

    def filled(loss_call, result):
        fill(loss_call, result)
        old = loss_call.inputs.get("old_per_token_logps")
        mask = loss_call.inputs["completion_mask"].bool()
        differences.append(0.0 if old is None else float((old - result.logps.detach())[mask].abs().amax()))

    with mock.patch.object(trainer._fused.old_logps, "fill", filled):
        trainer.train()
    assert trainer.model.dtype == torch.bfloat16
    assert len(differences) == trainer._step
    assert max(differences) == 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
def test_a_window_that_ends_earlier_than_it_was_when_generation_began(tmp_path, sampler):
    """A reward function changes its length. What is left out for the rest of it is computed before the weights move."""

    def shortens(trainer):
        (rewards,) = trainer.reward_funcs

        def reward(*args, **kwargs):
            trainer.args.gradient_accumulation_steps = 2
            return rewards(*args, **kwargs)

        trainer.reward_funcs = [reward]
        return trainer

    options = {"sampler": sampler, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    expected = train(shortens(trainer_of(tmp_path, GRPOTrainer, **options)))
    assert_same(train(shortens(trainer_of(tmp_path, **options))), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
@pytest.mark.parametrize("schedule", ["two windows", "two iterations"])
def test_a_reward_function_that_generates_too(tmp_path, schedule, sampler):
    """What its generation leaves out, or does not, says nothing of the one around it."""

    def evaluates(trainer):
        (rewards,) = trainer.reward_funcs

        def reward(*args, **kwargs):
            if trainer.model.training:
                trainer.evaluate()
                trainer.model.train()
            return rewards(*args, **kwargs)

        trainer.reward_funcs = [reward]
        return trainer

    options = {"sampler": sampler, "max_steps": 4, "beta": 0.1, **SCHEDULES[schedule]}
    expected = train(evaluates(trainer_of(tmp_path, GRPOTrainer, **options)))
    assert_same(train(evaluates(trainer_of(tmp_path, **options))), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("own", [{}, {"fused_skip_zero_grad_sequences": True}], ids=["", "skipping"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 3},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 4},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    ],
    ids=["three iterations", "four windows", "no fit"],
)
def test_a_generation_in_the_middle_of_a_generation_batch(tmp_path, options, own, sampler):
    """TRL generates anew where somebody dropped its micro-batches."""

    class Drops(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_step_end(self, *args, **kwargs):
            self.trainer._buffered_inputs = None

    results = []
    for cls, extra in ((GRPOTrainer, {}), (FusedGRPOTrainer, own)):
        trainer = trainer_of(tmp_path, cls, sampler, learning_rate=0.1, **options, **extra)
        trainer.add_callback(Drops(trainer))
        results.append(train(trainer))
    (weights, log), (expected, stock_log) = results[1], results[0]
    assert max(relative_error(weights[name], weight) for name, weight in expected.items()) < 1e-5
    changed = ("entropy", "sampling/") if own else ()
    for entry, stock_entry in zip(log, stock_log, strict=True):
        for name in {name for name in stock_entry if not name.startswith((*changed, "step_time"))}:
            assert entry[name] == pytest.approx(stock_entry[name], rel=2e-4, abs=1e-6), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fused_loss_switched_off_after_an_interruption(tmp_path, schedule, sampler):
    """TRL's own loss then finds the old log-probs that were left to the training."""

    def interrupted(cls):
        trainer = trainer_of(tmp_path, cls, sampler, max_steps=3, **SCHEDULES[schedule])
        gather, calls = type(trainer.accelerator).gather, iter(range(1000))

        def fails(accelerator, *args, **kwargs):
            if trainer.model.training and torch.is_grad_enabled() and next(calls) == 0:
                raise KeyboardInterrupt
            return gather(accelerator, *args, **kwargs)

        with mock.patch.object(type(trainer.accelerator), "gather", fails), pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.use_liger_loss = False
        torch.manual_seed(5)
        return train(trainer)[0]

    expected, weights = interrupted(GRPOTrainer), interrupted(FusedGRPOTrainer)
    assert max(relative_error(weights[name], weight) for name, weight in expected.items()) < 1e-5


def _scaled(batch):
    return {**batch, "old_per_token_logps": 1.02 * batch["old_per_token_logps"]}


class ChangesGeneration:
    def _generate_and_score_completions(self, inputs):
        return _scaled(super()._generate_and_score_completions(inputs))


class ChangesLoss:
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, _scaled(inputs))


class ChangesStep:
    def training_step(self, model, inputs, num_items_in_batch=None):
        for batch in self._buffered_inputs or []:
            batch["advantages"] = batch["advantages"] + 0.1 * (batch["old_per_token_logps"] < -7).float().mean()
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("sampler", ["no vLLM", "token_truncate"])
@pytest.mark.parametrize("schedule", ["two windows", "two iterations"])
@pytest.mark.parametrize("change", [ChangesGeneration, ChangesLoss, ChangesStep])
def test_a_method_that_reads_or_changes_them_has_those_of_generation(tmp_path, change, schedule, sampler):
    options = {"sampler": sampler, "learning_rate": 0.1, **SCHEDULES[schedule]}
    stock, fused = (type(cls.__name__, (change, cls), {}) for cls in (GRPOTrainer, FusedGRPOTrainer))
    expected, _ = train(trainer_of(tmp_path, stock, config=GRPOConfig, **options))
    weights, _ = train(trainer_of(tmp_path, fused, **options))
    assert max(relative_error(weights[name], weight) for name, weight in expected.items()) < 1e-5
