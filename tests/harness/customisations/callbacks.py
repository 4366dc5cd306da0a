"""Callbacks that read or change something within an accumulation window, and interrupted trainings."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.harness.case import Customisation
from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.tiny.batches import GROUP, ROWS
from trl_fused_grpo.parity.trainers import StockGRPOTrainer

from .methods import gradient_norm, subclass
from .objectives import generation_nan


class _Calling(TrainerCallback):
    """Calls `act(trainer, control, number)` at an event; `number` counts its earlier occurrences."""

    def __init__(self, event: str, trainer: Trainer, act: Callable[..., Any]):
        count = iter(range(10_000))
        setattr(self, event, lambda args, state, control, **_: act(trainer, control, next(count)))


def at(
    event: str, act: Callable[[Trainer, Any, int], Any], train: Callable[[Trainer], Any] | None = None
) -> Customisation:
    """A callback that calls `act` with the trainer, the control and the number of the event's earlier occurrences."""
    return Customisation(
        change_trainer=lambda trainer: trainer.add_callback(_Calling(event, trainer, act)), train=train
    )


def see_gradients(trainer: Trainer, control: Any, number: int) -> None:
    trainer.seen.append(gradient_norm(trainer.model))


def clip_gradients(trainer: Trainer, control: Any, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.3)


@torch.no_grad()
def scale_weights(trainer: Trainer, control: Any, number: int) -> None:
    for parameter in trainer.model.parameters():
        parameter *= 1.0 + 0.002 * (number % 3)


def stop_epoch(trainer: Trainer, control: Any, number: int) -> None:
    control.should_epoch_stop = number == 1


def stop_training(trainer: Trainer, control: Any, number: int) -> None:
    control.should_training_stop = number == 4  # in the second accumulation window


def interrupt(trainer: Trainer, control: Any, number: int) -> None:
    if number == 4:
        raise KeyboardInterrupt


def train_again(trainer: Trainer) -> None:
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.train()


def out_of_memory_once(trainer: Trainer) -> None:
    """
    Memory runs out in TRL's loss of the sixth micro-batch, when it gathers metrics: its forward has run by then. The
    training begins anew. TRL's newest releases refuse the option in the constructor.
    """
    trainer.args.auto_find_batch_size = True
    gather, is_over = trainer.accelerator.gather, []

    def gather_or_fail(value: Any) -> Any:
        if trainer.model.training and trainer._step == 5 and not is_over:
            is_over.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gather(value)

    trainer.accelerator.gather = gather_or_fail


def evaluate(trainer: Trainer, control: Any, number: int) -> None:
    if number in (1, 4):
        trainer.evaluate(Dataset.from_dict({"prompt": ["w5 w6"] * (ROWS // GROUP)}))
        trainer.model.train()


def without_nan(trainer: Trainer, control: Any, number: int) -> None:
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def set_iterations(trainer: Trainer, control: Any, number: int) -> None:
    trainer.num_iterations = 2


def set_epsilon(trainer: Trainer, control: Any, number: int) -> None:
    trainer.epsilon_low = trainer.epsilon_high = (0.001, 0.5)[number % 2]


def set_temperature(trainer: Trainer, control: Any, number: int) -> None:
    trainer.temperature = 0.7


def freeze(trainer: Trainer, control: Any, number: int) -> None:
    trainer.model.model.layers[0].requires_grad_(number == 0)  # from the second step on


def nan_advantage() -> Customisation:
    """The loss of one micro-batch in the second step is NaN, and a callback replaces NaN in the gradients by zero."""
    return replace(subclass(generation_nan), change_trainer=at("on_pre_optimizer_step", without_nan).change_trainer)


def own_shuffle() -> Customisation:
    """TRL's function that shuffles a generation batch is replaced in its module."""

    def reverse(batch: dict[str, Any]) -> dict[str, Any]:
        return {n: v.flip(0) if isinstance(v, torch.Tensor) and v.dim() else v for n, v in batch.items()}

    module = sys.modules[StockGRPOTrainer.__module__]
    return Customisation(patch_trl=lambda: mock.patch.object(module, "shuffle_sequence_dict", reverse))


def equal_rewards() -> Customisation:
    """Every completion has the same reward, so that all advantages are zero."""

    def change_trainer(trainer: Trainer) -> None:
        trainer.reward_funcs[0] = lambda completions, **_: [1.0] * len(completions)

    return Customisation(change_trainer=change_trainer, has_no_update=True)
