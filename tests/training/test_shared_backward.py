"""
Memory that runs out in the backward of a forward that micro-batches share: the training ends as in stock, the log says
what to set, and nothing is left for the next training.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny_training import make_trainer
from trl_fused_grpo.modeling.attention import packed as packed_attention


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
    """
    Its `limit` is for how many tokens the first attention has memory in backward, when weights behind it have their
    gradients. Its `tokens` are those of every such forward.
    """
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
    options = {"fused_max_tokens_per_forward": 10_000, **options}
    trainer = make_trainer(folder, per_device_train_batch_size=1, optim="sgd", learning_rate=0.1, **options)
    trainer.train()
    logs = [
        {k: v for k, v in entry.items() if "time" not in k and "second" not in k} for entry in trainer.state.log_history
    ]
    return logs, [parameter.detach().clone() for parameter in trainer.model.parameters()]


TOLD = "Memory ran out where 8 micro-batches share a forward: fused_max_tokens_per_forward sets how many tokens may"


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_the_training_ends_and_the_log_says_what_to_set(tmp_path, memory, caplog, options):
    logs, weights = train(tmp_path, memory, **options)
    assert "Memory ran out" not in caplog.text
    memory.limit = max(memory.tokens) - 1
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, memory, **options)
    assert caplog.text.count(TOLD) == 1
    found_logs, found = train(tmp_path, memory, **options, fused_max_tokens_per_forward=0)  # as it says
    assert max(memory.tokens) <= memory.limit
    for mine, other in zip(found_logs, logs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    for mine, other in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    memory.limit = 10_000
    _, again = train(tmp_path, memory, **options)
    assert all(torch.equal(mine, other) for mine, other in zip(again, weights, strict=True))


def test_the_same_trainer_trains_again_what_it_would_have_trained(tmp_path, memory):
    options = {"gradient_accumulation_steps": 8, "max_steps": 1, "fused_max_tokens_per_forward": 10_000}
    trainers = [make_trainer(tmp_path, per_device_train_batch_size=1, **options) for _ in range(2)]
    for number, trainer in enumerate(trainers):
        if number == 1:
            memory.limit = 1
            with pytest.raises(torch.OutOfMemoryError):
                trainer.train()
            memory.limit = 10_000
            trainer.model.zero_grad()
            assert not trainer._fused.forwards.is_waiting
        torch.manual_seed(2)
        trainer._buffered_inputs = None
        trainer._step = 0
        trainer.train()
    for mine, other in zip(trainers[1].model.parameters(), trainers[0].model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_alone_that_does_not_fit_raises_and_tells_nothing(tmp_path, memory, caplog):
    memory.limit = 1
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, memory, fused_max_tokens_per_forward=0)
    assert "Memory ran out" not in caplog.text
