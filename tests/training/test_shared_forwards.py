"""Micro-batches that share a forward: nothing but the number of forwards changes."""

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import set_seed
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_inputs, make_trainer
from tests.training.shared_forwards import PLENTY, assert_same_training, fused_forwards, train
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.loss.forecast import BatchForecast
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest
from trl_fused_grpo.training.forward import AccumulationWindow
from trl_fused_grpo.training.plan import Forward, Plan
from trl_fused_grpo.training.requests import build_loss_request


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "bnpo"},
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "top_entropy_quantile": 0.5},
        {"loss_type": "dapo", "num_iterations": 2, "max_steps": 4},
        {"loss_type": "bnpo", "gradient_checkpointing": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_accumulation_window_in_one_forward_trains_and_logs_what_stock_does(tmp_path, options):
    stock = train(tmp_path, GRPOTrainer, **options)
    fused = train(tmp_path, fused_max_tokens_per_forward=PLENTY, **options)
    means = ("entropy", "clip_ratio/region_mean", *(("kl",) if "beta" in options else ()))
    assert_same_training(fused, stock, ("loss", "grad_norm", *means))
    steps = len(stock[1])
    assert len(stock[2]) == 4 * steps
    assert len(fused[2]) == steps


def test_rows_that_are_not_packed_any_more_share_no_forward(tmp_path):
    """A model that refuses packed rows after the plan was made keeps TRL's padding from then on."""
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2
    batches = [make_inputs(seed=seed) for seed in range(2)]
    with mock.patch.object(type(trainer._fused.window), "steps_left", 2):
        for packed in (True, False):
            trainer._fused.forwards.follow(Plan(tuple(batches), (Forward(range(2)),)))
            trainer._fused.engine.packs = lambda *_, packed=packed: packed
            trainer._step = 0
            trainer.compute_loss(trainer.model, batches[0])
            trainer._step = 1
            assert (trainer._fused.forwards.take_logps(batches[1]) is not None) == packed


@pytest.fixture(scope="module")
def stock_and_fused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    options = {"gradient_accumulation_steps": 3}
    return [
        make_trainer(folder, GRPOTrainer, **options),
        make_trainer(folder, FusedGRPOTrainer, **options),
    ]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=2), min_size=3, max_size=3),
    prompts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    off_policy=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_shared_forward_has_the_gradients_of_its_micro_batches_whatever_the_lengths(
    stock_and_fused, lengths, prompts, off_policy, seed
):
    stock, fused = stock_and_fused
    batches = [make_inputs(rows=2, seed=seed + number) for number in range(3)]
    some_prompts = torch.randint(3, 1000, (3, 3), generator=torch.Generator().manual_seed(seed))
    for number, (batch, row_lengths) in enumerate(zip(batches, lengths, strict=True)):
        batch["completion_mask"] = (torch.arange(8) < torch.tensor(row_lengths)[:, None]).long()
        batch["prompt_ids"] = some_prompts[prompts[2 * number : 2 * number + 2]]
        batch["prompt_mask"] = torch.ones(2, 3, dtype=torch.long)
        batch["num_items_in_batch"] = torch.tensor(max(sum(map(sum, lengths)), 1))  # older TRL divides by it
        if off_policy:
            batch["old_per_token_logps"] = torch.full((2, 8), -6.9)

    def loss_and_gradients(trainer, loss_of):
        trainer.model.train()
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = 3
        loss = loss_of()
        loss.backward()
        return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    def stock_loss():
        return sum(stock.compute_loss(stock.model, dict(batch)) for batch in batches)

    def merged_loss():
        fused._fused.window.begin(epoch=object())
        fused._fused.forwards.follow(Plan(tuple(batches), (Forward(range(3)),)))
        total = 0.0
        for step, batch in enumerate(batches):
            fused._fused.window._steps_done = fused._step = step
            fused.accelerator.gradient_state._set_sync_gradients(step == 2)
            window = fused._fused.window  # as within the training step of a training
            with temporary_attr(window, "is_in_step", True), temporary_attr(window, "is_in_train", True):
                total = total + fused.compute_loss(fused.model, batch)
        return total

    forwards = []
    with fused_forwards(forwards):
        loss, gradients = loss_and_gradients(fused, merged_loss)
    assert len(forwards) == 1
    expected_loss, expected = loss_and_gradients(stock, stock_loss)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert (gradients - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("accumulation", "generation", "forwards"),
    [(2, 4, 4), (4, 2, 8), (1, 4, 4)],
    ids=["two-steps-per-generation", "two-generations", "no-accumulation"],
)
def test_a_shared_forward_ends_with_the_accumulation_window_and_the_generation_batch(
    tmp_path, accumulation, generation, forwards
):
    options = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": generation,
        "max_steps": 4,
    }
    fused = train(tmp_path, fused_max_tokens_per_forward=PLENTY, **options)
    assert_same_training(fused, train(tmp_path, GRPOTrainer, **options))
    assert len(fused[2]) == forwards


def test_the_last_accumulation_window_of_an_epoch_may_be_short(tmp_path):
    """Sixteen generation batches an epoch, of which three make an accumulation window: the last one has one."""
    options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3, "steps_per_generation": 1}
    stock = train(tmp_path, GRPOTrainer, **options)
    assert len(stock[2]) % 3 != 0
    assert_same_training(train(tmp_path, fused_max_tokens_per_forward=PLENTY, **options), stock)


def accumulate_two(trainer, between):
    """Losses and gradients of an accumulation window of two micro-batches. `between` is called between them."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 2
    examples = [{"prompt": "w5 w6 w7"}] * 8
    losses = []
    set_seed(0)
    for is_last in (False, True):
        trainer.accelerator.gradient_state._set_sync_gradients(is_last)
        losses.append(trainer.training_step(trainer.model, examples, None))
        if not is_last:
            between()
    return torch.stack(losses), [parameter.grad.clone() for parameter in trainer.model.parameters()]


def move_weights(trainer):
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)


def halve_gradients(trainer):
    for parameter in trainer.model.parameters():
        parameter.grad.mul_(0.5)


def add_hook(trainer):
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def evaluate(trainer):
    state = torch.get_rng_state()
    trainer.evaluate()
    torch.set_rng_state(state)


def leave_in_evaluation(trainer):
    trainer.model.eval()


@pytest.mark.parametrize("between", [move_weights, halve_gradients, add_hook, evaluate, leave_in_evaluation])
def test_in_a_loop_of_the_users_own_anything_may_happen_between_micro_batches(tmp_path, between):
    found = []
    for cls, options in ((GRPOTrainer, {}), (FusedGRPOTrainer, {"fused_max_tokens_per_forward": PLENTY})):
        trainer = make_trainer(tmp_path, cls, gradient_accumulation_steps=2, **options)
        found.append(accumulate_two(trainer, partial(between, trainer)))
        assert all(module.training for module in trainer.model.modules())
    (losses, gradients), (expected_losses, expected) = found
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert max(relative_error(mine, other) for mine, other in zip(gradients, expected, strict=True)) < 1e-5


def test_the_next_forward_of_a_window_is_launched_before_trainer_waits_for_the_loss(tmp_path):
    calls, step_ends, fused = [], AccumulationWindow.step_ends, FusedRequest.__call__

    def count_step(self):
        calls.append("step")
        step_ends(self)

    def count_forward(self, causal_lm, **model_inputs):
        calls.append("forward")
        return fused(self, causal_lm, **model_inputs)

    with (
        mock.patch.object(AccumulationWindow, "step_ends", count_step),
        mock.patch.object(FusedRequest, "__call__", count_forward),
    ):
        train(tmp_path, fused_max_tokens_per_forward=0)
    assert calls == ["forward", *(["forward", "step"] * 3), "step"] * 2


def test_nothing_waits_from_a_training_that_was_interrupted(tmp_path):
    options = {"gradient_accumulation_steps": 4, "max_steps": 1, "fused_max_tokens_per_forward": PLENTY}
    trainers = [make_trainer(tmp_path, **options) for _ in range(2)]
    trainers[1]._fused.forwards._losses = [sum(p.sum() for p in trainers[1].model.parameters())]
    for trainer in trainers:
        set_seed(0)
        trainer.train()
    for parameter, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        assert torch.equal(parameter, other)


def test_joined_forecasts_keep_the_proportions_of_their_losses(tmp_path):
    """Each is scaled by a power of two of its own; under bnpo a micro-batch with few tokens weighs them the more."""
    trainer = make_trainer(tmp_path, loss_type="bnpo", gradient_accumulation_steps=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    batches = [make_inputs(rows=rows, seed=rows) for rows in (1, 6)]
    forecasts = [build_loss_request(trainer, batch, skip_zero_grad=False).forecast for batch in batches]
    joined = BatchForecast.joined(forecasts)
    true = []
    for batch in batches:
        logps = torch.zeros(batch["completion_mask"].shape, requires_grad=True)
        trainer._get_per_token_logps_and_entropies = lambda *args, logps=logps, **kwargs: (
            (logps, torch.zeros_like(logps)) + (None,) * trl_compat.RETURNS_AUX_LOSS
        )
        (gradient,) = torch.autograd.grad(trainer._compute_loss(trainer.model, batch), logps)
        true.append(gradient)
    assert forecasts[0].unit != forecasts[1].unit
    for number, (start, end) in enumerate([(0, 1), (1, 7)]):
        expected = true[number] * joined.unit
        torch.testing.assert_close(joined.on_policy[start:end], expected, rtol=1e-6, atol=0.0)
