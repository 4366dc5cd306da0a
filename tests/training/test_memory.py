"""`fused_memory`: what a training takes of the device's memory for speed, and that it trains the same."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo import FusedGRPOConfig
from trl_fused_grpo.modeling.head import fused_forward
from trl_fused_grpo.training import engine, memory
from trl_fused_grpo.training.memory import MemoryBudget


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """1000 bytes of which 200 stay allocated; a step takes 300 more."""
    numbers = SimpleNamespace(total_memory=1000, allocated=200, peak=500)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: numbers)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: numbers.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: numbers.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    return numbers


CPU = torch.device("cpu")
WEIGHT = nn.Parameter(torch.zeros(25))  # 100 bytes, and so its gradient


def learned(fraction, tokens=10):
    """A budget that has seen two steps."""
    budget = MemoryBudget((fraction + 1e-6) / memory.USABLE, CPU)  # the limit is a whole number
    for step in range(2):
        budget.begin(step, tokens, [WEIGHT])
        budget.learn()
    return budget


def test_a_forward_gets_the_tokens_that_fit():
    """300 bytes were taken by 10 tokens."""
    assert learned(0.9).most_tokens([WEIGHT]) == 23  # in 700 bytes
    assert learned(0.55).most_tokens([WEIGHT]) == 11
    assert MemoryBudget(0.9, CPU).most_tokens([WEIGHT]) == 0


def test_gradients_that_exist_before_a_forward_are_part_of_what_it_takes(device):
    device.allocated = 300
    budget = MemoryBudget((0.9 + 1e-6) / memory.USABLE, CPU)
    WEIGHT.grad = torch.zeros(25)
    try:
        budget.begin(1, 10, [WEIGHT])
        budget.learn()
        assert budget.most_tokens([WEIGHT]) == 23
    finally:
        WEIGHT.grad = None


def test_a_forward_of_many_more_tokens_shows_anew_what_it_takes(device):
    budget = learned(0.9)
    device.peak = 850
    budget.begin(2, 11, [WEIGHT])  # not many more
    budget.learn()
    assert budget.most_tokens([WEIGHT]) == 23
    budget.begin(2, 20, [WEIGHT])
    budget.learn()
    assert budget.most_tokens([WEIGHT]) == 21  # 650 bytes were taken by 20


def test_the_forward_that_took_most_counts(device):
    budget = learned(0.9)
    device.peak = 300  # somebody let torch count the peak anew
    budget.begin(1, 10, [WEIGHT])
    budget.learn()
    assert budget.most_tokens([WEIGHT]) == 23


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("together", [1, 3])
def test_tokens_are_counted_as_the_model_runs_them(tmp_path, monkeypatch, device, layout, together):
    """A prompt of several completions once in packed rows; what a limit of tokens allows is counted the same way."""
    seen, counted = [], []

    class Counting(MemoryBudget):
        def begin(self, step, tokens, parameters):
            counted.append(tokens)

    options = {"gradient_accumulation_steps": 3, "max_steps": 1, "fused_layout": layout, "fused_memory": 0.5}
    monkeypatch.setattr(engine, "memory_budget", lambda trainer, fraction: Counting(fraction, CPU))
    device.total_memory = 2**40
    trainer = make_trainer(tmp_path, fused_max_tokens_per_forward=10_000 if together > 1 else 0, **options)
    use_sampler(trainer)

    run_backbone = fused_forward.run_backbone

    def count(causal_lm, model_inputs, compiled):
        if torch.is_grad_enabled():
            seen.append(model_inputs["input_ids"].numel())
        return run_backbone(causal_lm, model_inputs, compiled)

    monkeypatch.setattr(fused_forward, "run_backbone", count)
    trainer.train()
    assert counted and sum(counted) == sum(seen)


def test_a_budget_below_what_is_taken_anyway_is_told(caplog):
    assert learned(0.4).most_tokens([WEIGHT]) == 6
    assert "fused_memory has no effect" in caplog.text


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, 60])
def test_no_fraction_is_refused(tmp_path, fraction):
    with pytest.raises(ValueError, match="fused_memory must be None or a fraction"):
        make_trainer(tmp_path, fused_memory=fraction)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_cpu_has_no_budget(tmp_path, caplog):
    trainer = make_trainer(tmp_path, fused_memory=0.5)
    assert "fused_memory=0.5 has no effect, because the model is on cpu" in caplog.text
    assert trainer._fused.engine.memory is None


def test_forwards_grow_into_it_and_train_the_same(tmp_path, monkeypatch, device):
    rows, original = [], engine.compute_logps

    def compute_logps(request, options, call, images):
        if torch.is_grad_enabled():
            rows.append(len(call.input_ids))
        return original(request, options, call, images)

    def trained(**options):
        options = {"gradient_accumulation_steps": 4, "optim": "sgd", "learning_rate": 0.1, "max_steps": 3, **options}
        trainer = make_trainer(tmp_path, per_device_train_batch_size=2, num_generations=2, **options)
        rows.clear()
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], list(
            trainer.model.parameters()
        )

    def plenty(trainer, fraction):
        return None if fraction is None else MemoryBudget(fraction, CPU)

    device.total_memory, device.allocated, device.peak = 2**40, 0, 2**20
    monkeypatch.setattr(engine, "compute_logps", compute_logps)
    monkeypatch.setattr(engine, "memory_budget", plenty)
    monkeypatch.setattr(memory, "gradient_memory", lambda *_: memory.GradientMemory())
    expected, before = trained(), [*rows]
    found = trained(fused_memory=0.9)
    assert before == [2] * 12 and rows == [*[2] * 4, 8, 8]  # from the second step on
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_shared_forward_that_finds_no_memory_is_split_and_nothing_is_lost(tmp_path, monkeypatch, caplog):
    rows = []

    def trained():
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
        trainer = make_trainer(tmp_path, optim="sgd", learning_rate=0.1, max_steps=2, **options)
        trainer.args.fused_max_tokens_per_forward = 10_000
        rows.clear()
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], list(
            trainer.model.parameters()
        )

    def compute_logps(request, options, call, images):
        if torch.is_grad_enabled():
            rows.append(len(call.input_ids))
            if len(call.input_ids) > limit:
                raise torch.OutOfMemoryError("as CUDA would")
        return original(request, options, call, images)

    original, limit = engine.compute_logps, 100
    monkeypatch.setattr(engine, "compute_logps", compute_logps)
    expected = trained()
    assert rows == [8, 8]
    limit = 2
    found = trained()
    assert rows == [8, *[2] * 8]  # each alone from then on
    assert caplog.text.count("Memory ran out where 4 micro-batches share a forward") == 1
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_it_is_off_by_default(tmp_path):
    assert FusedGRPOConfig(output_dir=str(tmp_path), use_cpu=True).fused_memory is None
