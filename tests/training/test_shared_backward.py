"""Memory that runs out in the backward of a forward that micro-batches share: it is done again in parts."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests.tiny_training import make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling import packed_attention


class _LimitedBackward(torch.autograd.Function):
    """The identity. Its backward finds no memory for more tokens than `limit`."""

    @staticmethod
    def forward(ctx, output, limit):
        ctx.limit = limit
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        if grad.shape[1] > ctx.limit:
            raise torch.OutOfMemoryError("as CUDA would")
        return grad, None


@pytest.fixture
def memory(monkeypatch):
    """Its `limit` is how many tokens the first layer's attention has memory for in backward, when the other layer's
    weights have their gradients; its `tokens` are those of every forward that has gradients."""

    memory = SimpleNamespace(limit=10_000, tokens=[])

    def varlen_attention(module, *args, **kwargs):
        output = original(module, *args, **kwargs)
        if module.layer_idx != 0 or not output.requires_grad:
            return output
        memory.tokens.append(output.shape[1])
        return _LimitedBackward.apply(output, memory.limit)

    original = packed_attention.varlen_attention
    monkeypatch.setattr(packed_attention, "varlen_attention", varlen_attention)
    return memory


def train(folder, memory, **options):
    """Two optimizer steps of eight micro-batches: their logs without times, and the weights."""
    memory.tokens.clear()
    torch.manual_seed(0)  # older TRL draws an adapter before it sets its seed
    options = {"gradient_accumulation_steps": 8, "steps_per_generation": 8, "max_steps": 2, **options}
    trainer = make_trainer(folder, per_device_train_batch_size=1, optim="sgd", learning_rate=0.1, **options)
    trainer.args.fused_max_tokens_per_forward = 10_000
    trainer.train()
    logs = [
        {k: v for k, v in entry.items() if "time" not in k and "second" not in k} for entry in trainer.state.log_history
    ]
    return logs, [parameter.detach().clone() for parameter in trainer.model.parameters()]


OPTIONS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "reference": {"beta": 0.1},
    "whole-sequences": {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "lora": {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"])},
    **({"entropy-bonus": {"entropy_coef": 0.1}} if trl_compat.TRL.release >= (1, 8) else {}),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_done_again_in_parts_and_nothing_is_lost(tmp_path, memory, caplog, options):
    logs, weights = train(tmp_path, memory, **options)
    together = max(memory.tokens)
    assert "Memory ran out" not in caplog.text
    memory.limit = together - 1
    found_logs, found = train(tmp_path, memory, **options)
    assert caplog.text.count("Memory ran out in the backward of a shared forward: at most 4 micro-batches") == 1
    # The first forward, whose layers may be computed again in backward. Then halves, and so from then on
    forwards = 2 if "gradient_checkpointing" in options else 1
    assert memory.tokens[:forwards] == [together] * forwards
    assert max(memory.tokens[forwards:]) < together
    for mine, other in zip(found_logs, logs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    for mine, other in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_parts_are_halved_until_they_fit(tmp_path, memory, caplog):
    _, weights = train(tmp_path, memory)
    memory.limit = max(memory.tokens) // 3
    _, found = train(tmp_path, memory)
    assert "at most 1 micro-batches" in caplog.text or "at most 2 micro-batches" in caplog.text
    for mine, other in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_that_does_not_fit_alone_ends_the_training_and_leaves_nothing(tmp_path, memory):
    _, weights = train(tmp_path, memory)
    memory.limit = 1
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, memory)
    memory.limit = 10_000
    _, again = train(tmp_path, memory)
    assert all(torch.equal(mine, other) for mine, other in zip(again, weights, strict=True))


def test_a_forward_that_draws_random_numbers_is_not_repeated(tmp_path, memory):
    dropout = {"peft_config": LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)}
    train(tmp_path, memory, **dropout)
    memory.limit = max(memory.tokens) - 1
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, memory, **dropout)
