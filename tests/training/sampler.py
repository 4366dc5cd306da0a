"""A stand-in for vLLM: completions and sampling log-probs of a trainer that has no engine."""

from types import SimpleNamespace

import torch


def sampled(prompts, seed):
    """Token ids of prompts and completions, and the log-probs that a sampler with slightly other weights returns."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (len(prompts),), generator=generator).tolist()
    completions = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in lengths]
    logps = [(-6.5 + torch.randn(n, generator=generator)).tolist() for n in lengths]
    return [[5, 6, 7, 8][: 1 + i % 4] for i in range(len(prompts))], completions, logps


def expect_sampler(trainer):
    """Let a trainer, made without vLLM, take log-probs of a sampler that come with its completions."""
    trainer.use_vllm = True  # the constructor would start vLLM
    trainer._last_loaded_step = 0
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)  # there is no engine to bring up to date
    trainer._move_model_to_vllm = lambda: None


def use_sampler(trainer):
    """Let a trainer, made without vLLM, train as if vLLM had generated its completions."""
    expect_sampler(trainer)
    use_rollouts(trainer)


def use_rollouts(trainer):
    """Let a trainer train on prompts and completions of many lengths, which do not depend on its model."""
    seeds = iter(range(100))
    train_on(trainer, lambda prompts: sampled(prompts, next(seeds)))


def train_on(trainer, sample):
    """Let a trainer train on what `sample(prompts)` returns: token ids of prompts and completions, and log-probs."""
    names = ("prompt_ids", "completion_ids", "logprobs")
    trainer._generate_single_turn = lambda prompts, *_, **__: (*sample(prompts), {})
    trainer.rollout_func = lambda prompts, trainer: dict(zip(names, sample(prompts), strict=True))
