"""Gives a trainer prepared data in place of its own generation."""

from collections.abc import Callable
from typing import Any

import torch

from trl_fused_grpo._compat.trainers import is_rloo
from trl_fused_grpo.parity.case import Trainer


def serve_rollouts(trainer: Trainer, generations: list[dict[str, Any]]) -> None:
    """
    Have a trainer generate prepared completions.

    Args:
        trainer ([`GRPOTrainer`] or [`RLOOTrainer`]):
            Its `rollout_func` and `_generate_single_turn` are replaced; RLOO's tokenization of prompts too.
        generations (`list[dict[str, Any]]`):
            From [`batches.rollout`], one for each generation in training. An evaluation gets the first rows of the
            first one.
    """
    remaining = iter(generations)

    def answer(count: int) -> dict[str, Any]:
        if trainer.model.training:
            return dict(next(remaining))
        return {name: value and value[:count] for name, value in generations[0].items()}

    def roll_out(prompts: list[Any], trainer: Trainer) -> dict[str, Any]:
        return answer(len(prompts))

    def single_turn(prompts: list[Any]) -> tuple[list, list, list | None, dict]:
        rollout = answer(len(prompts))
        return rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"], {}

    if is_rloo(trainer):
        _serve_rloo(trainer, answer)
        return
    trainer.rollout_func = roll_out
    trainer._generate_single_turn = single_turn  # TRL 0.27 calls rollout_func only when vLLM runs


def _serve_rloo(trainer: Trainer, answer: Callable[[int], dict[str, Any]]) -> None:
    if not hasattr(trainer, "_tokenize_prompts"):  # TRL 0.27 and 0.28
        trainer._generate_single_turn = lambda prompts: _ids(answer(len(prompts)))
        return
    waiting: list[Any] = []

    def tokenize(prompts: list[Any]) -> tuple[list, None, dict]:
        prompt_ids, completion_ids = _ids(answer(len(prompts)))
        waiting.append(completion_ids)
        return prompt_ids, None, {}

    trainer._tokenize_prompts = tokenize
    trainer._generate_single_turn = lambda *_: waiting.pop()


def _ids(rollout: dict[str, Any]) -> tuple[list, list]:
    return rollout["prompt_ids"], rollout["completion_ids"]


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
