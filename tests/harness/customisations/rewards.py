"""Reward functions that use the trainer or its model, and leave them changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trl_fused_grpo._compat.required import SAMPLING_CLIP_MAX
from trl_fused_grpo.parity.case import Trainer


def reward_asks(trainer: Trainer) -> None:
    """A reward that asks the trainer for the completions' log-probs, to reward the model's confidence."""
    plain = trainer.reward_funcs[0]

    def confident(completion_ids: list[list[int]], **more: Any) -> list[float]:
        width = max(map(len, completion_ids))
        ids = torch.full((len(completion_ids), 2 + width), 5, device=trainer.accelerator.device)
        mask = torch.zeros_like(ids)
        for row, completion in enumerate(completion_ids):
            ids[row, 2 : 2 + len(completion)] = torch.tensor(completion, device=ids.device)
            mask[row, : 2 + len(completion)] = 1
        with torch.no_grad():
            logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
        sums = (logps * mask[:, 2:]).sum(1).tolist()
        trainer.seen += sums
        return [a + 0.1 * b for a, b in zip(plain(completion_ids=completion_ids, **more), sums, strict=True)]

    trainer.reward_funcs[0] = confident


def _acts_first(trainer: Trainer, act: Callable[[], Any]) -> None:
    """The reward function does something before it rewards."""
    plain = trainer.reward_funcs[0]

    def acting(**columns: Any) -> list[float]:
        act()
        return plain(**columns)

    trainer.reward_funcs[0] = acting


def reward_logs(trainer: Trainer) -> None:
    """A reward function that calls `trainer.log`, which resets TRL's averages."""

    def log() -> None:
        if trainer.state.global_step:
            trainer.log({"mine": 1.0})

    _acts_first(trainer, log)


def reward_fails(trainer: Trainer) -> None:
    """A reward function that is interrupted in the second generation."""
    calls = iter(range(100))

    def fail() -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    _acts_first(trainer, fail)


def reward_evaluates(trainer: Trainer) -> None:
    """A reward function that leaves the model in evaluation. The next training step ends that."""
    _acts_first(trainer, lambda: trainer.model.eval())


def reward_switches_adapter(trainer: Trainer) -> None:
    """A reward function that leaves one of two adapters on, which it judges with."""
    _acts_first(trainer, lambda: trainer.model.set_adapter("default"))


def reward_changes_correction(trainer: Trainer) -> None:
    """A reward function that changes the bound of vLLM's ratios, which TRL has computed by then."""
    _acts_first(trainer, lambda: setattr(trainer, SAMPLING_CLIP_MAX, 0.9))


def with_two_adapters(checkpoint: Path) -> Any:
    """
    A model with two LoRA adapters, both on, the first with embeddings of its own. TRL's reference, a third one, leaves
    the first of them on alone.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"], init_lora_weights=False
    )
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model
