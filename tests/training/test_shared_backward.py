"""Memory that runs out in the backward of a forward that micro-batches share: it is done again in parts."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests.tiny_training import make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.required import TRANSFORMERS
from trl_fused_grpo.modeling import fused_forward, packed_attention


pytestmark = pytest.mark.ends


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
    gradients; in the forwards whose number is in `never` it has none. Its `tokens` are those of every such forward.
    """
    memory = SimpleNamespace(limit=10_000, never=(), tokens=[])

    def varlen_attention(module, *args, **kwargs):
        output = original(module, *args, **kwargs)
        kinds = getattr(module.config, "layer_types", None) or ["full_attention"]
        if module.layer_idx != kinds.index("full_attention") or not output.requires_grad:
            return output
        limit = 0 if len(memory.tokens) in memory.never else memory.limit
        memory.tokens.append(output.shape[1])
        return _LimitedBackward.apply(output, limit)

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


OPTIONS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "reference": {"beta": 0.1},
    "whole-sequences": {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "tied": {"kind": "tied"},
    # Before, its rows keep their padding
    **({"convolutions": {"kind": "lfm2"}} if TRANSFORMERS.major >= 5 else {}),
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_is_done_again_in_autograds_own_thread(tmp_path, memory, caplog):
    options = {"use_cpu": False, "gradient_checkpointing": True}
    _, weights = train(tmp_path, memory, **options)
    memory.limit = max(memory.tokens) - 1
    _, found = train(tmp_path, memory, **options)
    assert "Memory ran out in the backward" in caplog.text
    for mine, other in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_earlier_forwards_stay(tmp_path, memory, caplog):
    """Two forwards in an accumulation window: memory runs out in the backward of the second."""
    options = {"max_steps": 1, "fused_max_tokens_per_forward": 40}
    _, weights = train(tmp_path, memory, **options)
    assert len(memory.tokens) == 2
    memory.never = (1,)
    _, found = train(tmp_path, memory, **options)
    assert len(memory.tokens) == 4
    assert "Memory ran out in the backward" in caplog.text
    for mine, other in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nested", ["reentrant checkpoints", "aligned rows in widths"])
def test_a_backward_with_backwards_in_it_is_not_repeated(tmp_path, memory, monkeypatch, nested):
    """They add to gradients that are not complete."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    if nested == "aligned rows in widths":
        options = {"fused_layout": "aligned", "max_completion_length": 12}
    train(tmp_path, memory, **options)
    if nested == "aligned rows in widths":
        backward, calls = fused_forward._OwnBackward.backward, count()

        def second_fails(ctx, *grads):
            if next(calls):
                raise torch.OutOfMemoryError("as CUDA would")
            return backward(ctx, *grads)

        monkeypatch.setattr(fused_forward._OwnBackward, "backward", staticmethod(second_fails))
    else:
        memory.limit = max(memory.tokens) - 1
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, memory, **options)


@pytest.mark.parametrize("together", [1, 2])
def test_parts_are_halved_until_they_fit(tmp_path, memory, caplog, together):
    _, weights = train(tmp_path, memory)
    memory.limit = 3 + 8 * together  # a prompt and its completions
    _, found = train(tmp_path, memory)
    assert f"backward of a shared forward: at most {together} micro-batches" in caplog.text
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
