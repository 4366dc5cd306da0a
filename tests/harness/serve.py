"""Gives RLOO's trainer prepared completions in place of its own generation."""

from typing import Any

from trl_fused_grpo._compat.trainers import is_rloo
from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.tiny import batches


def serve_rollouts(trainer: Trainer, generations: list[dict[str, Any]]) -> None:
    """Have a trainer generate prepared completions, see [`batches.serve_rollouts`], RLOO's too."""
    if not is_rloo(trainer):
        batches.serve_rollouts(trainer, generations)
        return
    answer = batches.answers(trainer, generations)
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
