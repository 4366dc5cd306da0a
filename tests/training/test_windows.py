"""Accumulation windows that a callback ends early or makes longer, and epochs that it stops within one, as in stock."""

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from tests.training.shared_forwards import PLENTY, assert_same_training
from trl_fused_grpo import FusedGRPOTrainer


class AtStep(TrainerCallback):
    """Calls `act(args, control)` once, at this event after so many optimizer steps."""

    def __init__(self, event, step, act):
        self.step, self.act = step, act
        setattr(self, event, self.once)

    def once(self, args, state, control, **_):
        if state.global_step == self.step and self.act is not None:
            self.act(args, control)
            self.act = None


def accumulate(steps):
    def act(args, control):
        args.gradient_accumulation_steps = steps

    return act


def stop_epoch(args, control):
    control.should_epoch_stop = True


def stop_training(args, control):
    control.should_training_stop = True


def train(tmp_path, cls, callback, has_sampler=False, **options):
    """Weights, logs of the steps and of all, and the last gradients."""
    options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 6, "lr_scheduler_type": "constant", **options}
    config = None if issubclass(cls, FusedGRPOTrainer) else GRPOConfig
    trainer = make_trainer(tmp_path, cls, config=config, **options)
    if has_sampler:
        use_sampler(trainer)
    trainer.add_callback(AtStep(*callback))
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return (weights, log, trainer.state.log_history), [p.grad for p in trainer.model.parameters() if p.grad is not None]


CHANGES = {
    "two to four": (2, ("on_step_begin", 2, accumulate(4))),
    "two to four, out of step": (2, ("on_step_end", 1, accumulate(4))),
    "two to three": (2, ("on_step_end", 1, accumulate(3))),
    "four to three": (4, ("on_step_end", 1, accumulate(3))),
    "four to one": (4, ("on_step_begin", 1, accumulate(1))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("has_sampler", [False, True], ids=["", "sampler"])
@pytest.mark.parametrize("tokens", [None, PLENTY], ids=["default", "one forward"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_callback_changes_how_many_micro_batches_a_window_has(tmp_path, name, tokens, has_sampler):
    accumulation, callback = CHANGES[name]
    options = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 4, "has_sampler": has_sampler}
    limit = {} if tokens is None else {"fused_max_tokens_per_forward": tokens}
    stock, _ = train(tmp_path, GRPOTrainer, callback, **options)
    fused, _ = train(tmp_path, FusedGRPOTrainer, callback, **options, **limit)
    assert_same_training(fused, stock, ("loss", "grad_norm", "entropy"))


class FromList:
    """A data loader of the user's, whose iterator is that of a list."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(list(self.loader))

    def __len__(self):
        return len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def test_windows_of_any_data_loader_are_counted(tmp_path):
    def with_loader(cls):
        def get_train_dataloader(self):
            return FromList(super(own, self).get_train_dataloader())

        own = type(cls.__name__, (cls,), {"get_train_dataloader": get_train_dataloader})
        return own

    callback, options = ("on_step_end", 1, accumulate(3)), {"gradient_accumulation_steps": 2, "max_steps": -1}
    options.update(num_train_epochs=2, steps_per_generation=4)
    stock, _ = train(tmp_path, with_loader(GRPOTrainer), callback, **options)
    fused, _ = train(tmp_path, with_loader(FusedGRPOTrainer), callback, **options, fused_max_tokens_per_forward=PLENTY)
    assert_same_training(fused, stock, ("loss", "grad_norm", "entropy"))


def test_an_epoch_that_stops_within_a_window_leaves_its_gradients_to_the_next_epoch(tmp_path):
    options = {"gradient_accumulation_steps": 4, "num_train_epochs": 3, "max_steps": -1}
    stop = ("on_step_begin", 1, stop_epoch)
    stock, _ = train(tmp_path, GRPOTrainer, stop, **options)
    fused, _ = train(tmp_path, FusedGRPOTrainer, stop, **options, fused_max_tokens_per_forward=PLENTY)
    assert len(stock[1]) == 5
    assert_same_training(fused, stock, ("loss", "grad_norm", "entropy"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop", [stop_epoch, stop_training], ids=["epoch", "training"])
def test_sampling_metrics_of_a_generation_batch_are_logged_where_the_window_is_stopped(tmp_path, stop):
    options = {"gradient_accumulation_steps": 4, "num_train_epochs": 3, "max_steps": -1, "has_sampler": True}
    stock, fused = (
        train(tmp_path, cls, ("on_step_begin", 1, stop), **options)[0] for cls in (GRPOTrainer, FusedGRPOTrainer)
    )
    assert_same_training(fused, stock, ("loss", "grad_norm", "entropy"))
    logged, expected = (
        [{name: value for name, value in entry.items() if name.startswith("sampling/")} for entry in of[2]]
        for of in (fused, stock)
    )
    assert len(expected[-1 if stop is stop_training else 1]) > 1
    assert logged == [pytest.approx(entry, rel=1e-4) for entry in expected]


def test_a_training_that_stops_within_a_window_leaves_its_gradients(tmp_path):
    options = {"gradient_accumulation_steps": 4}
    stop = ("on_step_begin", 1, stop_training)
    _, expected = train(tmp_path, GRPOTrainer, stop, **options)
    _, gradients = train(tmp_path, FusedGRPOTrainer, stop, **options, fused_max_tokens_per_forward=PLENTY)
    assert len(gradients) == len(expected) > 0
    for gradient, stocks in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, stocks, rtol=1e-4, atol=1e-6)
