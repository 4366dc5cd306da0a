"""TRL's `AsyncGRPOTrainer`, stock and fused, on the CPU: made-up rollouts, and torch in FlashAttention 3's place."""

import itertools
import queue
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.harness.models import save_checkpoint
from trl_fused_grpo import fuse, fuse_config
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, tokenizer


# What differs from run to run, and what stock does not log
_LEFT_OUT = ("perf/", "fused/", "train_", "sample/time_in_queue")

# FSDP gathers the weights that are sent on all processes
NO_TRANSFER = SimpleNamespace(
    **dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), lambda *_: None), send_weights=list
)


def make_samples(seed: int = 0, groups: int = 6) -> list[RolloutSample]:
    """
    Groups of four completions to a prompt, of one to nine tokens. Many begin alike, two are the same, some tokens do
    not count, one in four has no advantage, and some ratios are clipped.
    """
    draw, samples = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = draw.integers(3, VOCAB_SIZE, draw.integers(1, 6)).tolist()
        for place in range(4):
            few = 6 if place < 3 else VOCAB_SIZE
            completion = draw.integers(3, few, draw.integers(1, 10)).tolist()
            ids, mask = np.array(prompt + completion), np.array([0] * len(prompt) + [1] * len(completion))
            if len(completion) > 3:
                mask[len(prompt) + 1] = 0
            logps = np.where(mask, draw.normal(-6.9, 0.3, len(ids)), 0.0).astype(np.float32)
            advantage = 0.0 if place == 2 else float(draw.normal())
            metrics = {"reward": advantage, "reward_std": float("nan")}
            samples.append(RolloutSample([], [], ids, mask, logps, advantage, 1, group, metrics))
        samples.append(samples[-1])
    return samples


class MadeUpWorker:
    """In the place of the rollout worker and of its queue: the same samples for ever."""

    def __init__(self, samples: list[RolloutSample]):
        self.samples = itertools.cycle(samples)
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.start = self.stop = self.update_model_version = self.check_health = lambda *_: None
        self.qsize = lambda: 0

    def get(self, timeout: float | None = None) -> RolloutSample:
        return next(self.samples)


def flash_attention(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any = None, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of FlashAttention 3, as TRL calls it."""
    parts = []
    for (a, b), (c, d) in zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if cap := options.get("softcap"):
            scores = torch.tanh(scores / cap) * cap
        distance = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        window = options["window_size"][0]
        hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
        parts.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@contextmanager
def stock_on_cpu() -> Generator[None, None, None]:
    """While it lasts, TRL's own trainer needs no GPU."""
    kernel = SimpleNamespace(flash_attn_varlen_func=flash_attention)
    with (
        mock.patch.object(packing, "_flash_attn", return_value=kernel),
        mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None),
    ):
        yield


def make_trainer(
    folder: Any, fused: bool, kind: str = "llama", peft_config: Any = None, cls: Any = AsyncGRPOTrainer, **options: Any
) -> Any:
    """A trainer on a tiny model. Stock gets none of the fused `options`."""
    own = {name: value for name, value in options.items() if fused or not name.startswith("fused_")}
    defaults = {"max_steps": 10, "gradient_accumulation_steps": 2, "token_budget": 40, "weight_sync_steps": 10**6}
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    quiet |= {"optim": "sgd", "learning_rate": 0.02, "logging_steps": 1}
    config: Any = fuse_config(AsyncGRPOConfig) if fused else AsyncGRPOConfig
    torch.manual_seed(0)
    trainer = (fuse(cls) if fused else cls)(
        model=str(save_checkpoint(kind, folder, torch.float32)),
        args=config(output_dir=str(folder / "out"), **{**quiet, **defaults, **own}),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"]}),
        processing_class=tokenizer(),
        rollout_worker=MadeUpWorker(make_samples()),
        weight_transfer=NO_TRANSFER,
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_batch(trainer: Any, samples: list[RolloutSample]) -> dict[str, Any]:
    """One micro-batch, all samples in a row."""
    row = packing.TreeRow()
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
    for sample in samples:
        row.add({name: getattr(sample, name) for name in names})
    return async_grpo_trainer.DataCollatorForRollout(0, metrics=trainer._metrics["train"])([[row]])


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def train(trainer: Any, weights_of: Any = _weights) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """How each parameter that trains moved, and the log without times."""
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    start = weights_of(trainer)
    trainer.train()
    moved = {name: weight - start[name] for name, weight in weights_of(trainer).items() if name in trained}
    logs = [{k: v for k, v in e.items() if not k.startswith(_LEFT_OUT)} for e in trainer.state.log_history]
    return moved, logs
