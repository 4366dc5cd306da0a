"""A window whose first forward takes the memory of gradients has no higher peak than stock's."""

import gc
import itertools

import pytest
import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from trl import GRPOTrainer

from tests.tiny_training import make_trainer
from tests.training.sampler import expect_sampler, train_on
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.training import memory, state


def generate(trainer, completions):
    """Let a trainer train on these completions, as if vLLM had generated them, whatever the prompts."""
    expect_sampler(trainer)
    prompts, logps = [[5, 6, 7, 8]] * len(completions), [[-6.5] * len(ids) for ids in completions]
    train_on(trainer, lambda _: (prompts, completions, logps))


@pytest.mark.nightly
def test_short_rows_of_a_window_do_not_take_more_than_stock_when_backward_ends(tmp_path):
    """Gradients of all weights are there then, and each token still needs what a layer computes for it."""
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=16,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    generator = torch.Generator().manual_seed(0)
    completions = [torch.randint(3, 1000, (12,), generator=generator).tolist() for _ in range(95)]
    completions.append([7] * 13)

    def peak(cls):
        torch.manual_seed(0)
        options = {"gradient_accumulation_steps": 24, "num_generations": 12, "max_completion_length": 13}
        model = Qwen3ForCausalLM(config)
        trainer = make_trainer(
            tmp_path, cls, model=model, optim="sgd", max_steps=1, gradient_checkpointing=True, **options
        )
        generate(trainer, completions)
        gc.collect()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.train()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate(event.nbytes() for event in events))

    stock, ours = peak(GRPOTrainer), peak(FusedGRPOTrainer)
    assert 0 < ours <= stock


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "longest"),
    [((1024, 16, 32_000), 2000), ((512, 24, 8_000), 2000), ((1024, 16, 2000), 60)],
    ids=["wide", "deep", "short-rows"],
)
def test_peak_memory_is_at_most_stock_s(tmp_path, monkeypatch, dtype, shape, longest):
    """Whole windows at TRL's defaults, where weights are most of the memory, little of it, and nearly all of it."""
    hidden, layers, vocab = shape
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
    )
    generator = torch.Generator().manual_seed(0)
    lengths = [longest, *torch.randint(longest // 33, longest // 2, (31,), generator=generator).tolist()]
    completions = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in lengths]

    def trained(cls):
        torch.manual_seed(0)
        options = {"num_generations": 8, "max_completion_length": longest, "gradient_accumulation_steps": 8}
        trainer = make_trainer(
            tmp_path,
            cls,
            model=Qwen3ForCausalLM(config).to(getattr(torch, dtype)),
            use_cpu=False,
            bf16=True,
            gradient_checkpointing=True,
            max_steps=3,
            **options,
        )
        generate(trainer, completions)
        clear_device_cache(garbage_collection=True)  # of earlier trainings, in other tests too
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        assert max(entry.get("completions/max_length", 0) for entry in trainer.state.log_history) == longest
        return torch.cuda.max_memory_allocated() - before

    stock = trained(GRPOTrainer)
    limits, original = [], memory.token_limits
    monkeypatch.setattr(state, "token_limits", lambda *args: limits.append(original(*args)) or limits[-1])
    # A compiled layer hands over its gradients at once. Rows of a few tokens have less padding than that
    with torch.device("meta"):
        layer = Qwen3DecoderLayer(config, 0).to(getattr(torch, dtype))
    at_once = sum(weight.nbytes for weight in layer.parameters()) if longest < 100 else 0
    assert trained(FusedGRPOTrainer) <= stock + at_once
    assert all(first > others for first, others in limits) and limits
