"""Gives a trainer prepared data in place of its own generation."""

from collections.abc import Callable
from typing import Any

import torch

from trl_fused_grpo.parity.case import Trainer


def serve_rollouts(trainer: Trainer, generations: list[dict[str, Any]]) -> None:
    """
    Have a trainer generate prepared completions.

    Args:
        trainer ([`GRPOTrainer`]): its `rollout_func` and `_generate_single_turn` are replaced.
        generations (`list[dict[str, Any]]`): from [`batches.rollout`], one for each generation in training. An
            evaluation gets the first rows of the first one.
    """
    answer = answers(trainer, generations)

    def roll_out(prompts: list[Any], trainer: Trainer) -> dict[str, Any]:
        return answer(len(prompts))

    def single_turn(prompts: list[Any]) -> tuple[list, list, list | None, dict]:
        rollout = answer(len(prompts))
        return rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"], {}

    trainer.rollout_func = roll_out
    trainer._generate_single_turn = single_turn  # TRL 0.27 calls rollout_func only when vLLM runs


def answers(trainer: Trainer, generations: list[dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """A function that takes a number of prompts and gives their completions, see [`serve_rollouts`]."""
    remaining = iter(generations)

    def answer(count: int) -> dict[str, Any]:
        if trainer.model.training:
            return dict(next(remaining))
        return {name: value and value[:count] for name, value in generations[0].items()}

    return answer


def serve_batches(trainer: Trainer, batches: list[dict[str, Any]]) -> None:
    """Have a trainer's `_prepare_inputs` return copies of `batches` on its device, one a call."""
    remaining = iter(batches)

    def prepare(_: Any) -> dict[str, Any]:
        return {name: copy_to(value, trainer.accelerator.device) for name, value in next(remaining).items()}

    trainer._prepare_inputs = prepare


def serves_batches(trainer: Trainer) -> bool:
    """Whether a trainer's micro-batches come from [`serve_batches`]."""
    return getattr(vars(trainer).get("_prepare_inputs"), "__module__", None) == __name__


def copy_to(value: Any, device: torch.device) -> Any:
    """A copy of a tensor on a device; anything else as it is."""
    return value.clone().to(device) if isinstance(value, torch.Tensor) else value
