"""
One micro-batch of a training is compared with TRL's own path, and with `fused_verify` one every so many steps: it finds
what is wrong, tells it and leaves the faster rows, and it changes nothing.
"""

import dataclasses
import multiprocessing
import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from trl import GRPOTrainer

from tests.tiny_training import make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.head import fused_forward
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training import checks, engine
from trl_fused_grpo.training.findings import Findings, Level

from .sampler import use_sampler


ERROR = "fused/verify_logps"


def lora(**options):
    pytest.importorskip("peft")
    from peft import LoraConfig

    return LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})


def train(tmp_path, sampler=False, **options):
    """Train; the trainer, and what was logged in each step without times."""
    torch.manual_seed(0)  # of adapters, which older TRL makes before it sets a seed
    trainer = make_trainer(tmp_path, **{"max_steps": 3, "gradient_accumulation_steps": 4, **options})
    if sampler:
        use_sampler(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer, [{k: v for k, v in entry.items() if k != "step_time"} for entry in steps]


def state_of(trainer):
    """Everything that a comparison must leave as it was: tensors by name, and the rest."""
    model = trainer.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "random": torch.get_rng_state()}
    tensors |= {f"moment {i}": t for i, one in enumerate(trainer.optimizer.state.values()) for t in one.values()}
    of_numpy = np.random.get_state()  # noqa: NPY002
    others = {
        "python": random.getstate(),
        "numpy": (of_numpy[1].tolist(), of_numpy[2]),
        "modes": [module.training for module in model.modules()],
        "parts": [(type(module), sorted(vars(module))) for module in model.modules()],
        "attributes": sorted(vars(trainer)),
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "metrics": {mode: sorted(values) for mode, values in trainer._metrics.items()},
    }
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, others


@pytest.fixture
def told(caplog):
    """The warnings of a comparison."""
    return lambda: [m for m in caplog.messages if "has no effect" in m or m.startswith("Level ")]


@pytest.fixture
def trl_calls(monkeypatch):
    """Calls of TRL's own log-prob method."""
    call = mock.Mock(wraps=trl_compat.call_trl_logps)
    monkeypatch.setattr(trl_compat, "call_trl_logps", call)
    return call


TRAININGS = {
    "shared forward": {"fused_max_tokens_per_forward": 10_000, "gradient_checkpointing": True},
    "another estimator": {"beta": 0.1, "kl_estimator": "k2", "loss_type": "grpo"},
    "tied, recompute": {"kind": "tied", "importance_sampling_level": "sequence", "fused_backward": "recompute"},
    "LoRA": {"adapter": {}, "beta": 0.1, "fused_max_tokens_per_forward": 10_000},
    "deferred ratio": {"sampler": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    "two iterations": {"fused_skip_zero_grad_sequences": True, "loss_type": "cispo", "num_iterations": 2},
    "adaptive": {
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 9.0,
        "gradient_accumulation_steps": 1,
    },
    "dropout": {"kind": "attention-dropout"},
    "dropout of LoRA": {"adapter": {"lora_dropout": 0.2}, "beta": 0.1, "gradient_checkpointing": True},
    "mixture of experts": {"kind": "moe"},
    "padded": {"fused_layout": "padded", "steps_per_generation": 8},
}


def options_of(name):
    options = dict(TRAININGS[name])
    if "entropy_coef" in options and trl_compat.TRL.release < (1, 8):
        pytest.skip("this TRL has no entropy bonus")
    if "adapter" in options:
        options["peft_config"] = lora(**options.pop("adapter"))
    if options.get("kind") == "attention-dropout":
        options["model"] = tiny_model("llama")
        options["model"].config.attention_dropout = 0.2
        options["model"].config._name_or_path = str(options.pop("kind"))
    return options


@pytest.mark.sample(3)
@pytest.mark.parametrize("every", [0, 2], ids=["first step", "fused_verify"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_comparison_finds_rounding_and_leaves_the_training_as_it_was(tmp_path, told, monkeypatch, name, every):
    options = options_of(name)
    if "model" in options:  # a model of its own for each
        torch.manual_seed(0)
    with monkeypatch.context() as without:
        without.setattr(checks.Check, "compare_logps", lambda *args: None)
        expected, expected_log = train(tmp_path, **options_of(name))
        state, others = state_of(expected)
    trainer, log = train(tmp_path, **options_of(name), fused_verify=every)
    found, found_others = state_of(trainer)
    assert found.keys() == state.keys()
    assert [name for name, tensor in state.items() if not torch.equal(found[name], tensor)] == []
    assert found_others == others
    assert trainer._fused.look() == Findings()
    for entry, plain, is_verified in zip(log, expected_log, (every > 0, False, every > 0), strict=True):
        assert (ERROR in entry) == is_verified
        assert entry.pop(ERROR, 0.0) <= 1e-5
        assert entry == plain
    assert not told()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 1),
        ({"fused_verify": 2}, 2),  # in the first step and in the third
        ({"beta": 0.1, "steps_per_generation": 8}, 1),
        ({"fused_max_tokens_per_forward": 0}, 1),
    ],
    ids=["plain", "fused_verify", "reference", "alone"],
)
def test_one_micro_batch_of_a_training_is_compared(tmp_path, trl_calls, options, calls):
    trainer, _ = train(tmp_path, **options)
    assert trl_calls.call_count == calls
    trainer.train()  # once more, from the start
    assert trl_calls.call_count == 2 * calls
    rows = {len(call.kwargs["input_ids"]) for call in trl_calls.call_args_list}
    assert rows == {4}


def test_nothing_is_compared_where_the_fused_loss_is_off_or_outside_of_a_training(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.Check, "_logps_error", mock.Mock(side_effect=AssertionError))
    train(tmp_path, use_liger_loss=False)
    trainer = make_trainer(tmp_path, fused_verify=1)
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, make_inputs()).backward()
    trainer.evaluate()


# What is wrong


def off_by(difference):
    """The fused head, whose log-probs are off."""
    original = fused_forward.fused_linear_logps

    def wrong(*args, **kwargs):
        logps, *others = original(*args, **kwargs)
        return logps + difference, *others

    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [0, 1], ids=["first step", "fused_verify"])
def test_wrong_log_probs_are_told_with_numbers_and_trls_own_path_trains_from_then_on(
    tmp_path, told, monkeypatch, every
):
    expected, _ = train(tmp_path, cls=GRPOTrainer)
    monkeypatch.setattr(fused_forward, "fused_linear_logps", off_by(0.01))
    trainer, log = train(tmp_path, fused_max_tokens_per_forward=10_000, fused_verify=every)
    assert trainer._fused.ladder.level == Level.STOCK
    weights = dict(expected.model.named_parameters())
    for name, weight in trainer.model.named_parameters():  # the first step is compared before it is trained on
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-6)
    (told_level,) = [line for line in told() if line.startswith("Level stock")]
    assert "in optimizer step 0" in told_level and "by 1.0e-02 nats" in told_level
    assert "float32" in told_level and "(1e-04)" in told_level
    if every:
        assert log[0][ERROR] == pytest.approx(0.01, rel=1e-2)
    trainer.train()  # it stays so for good
    assert trainer._fused.ladder.level == Level.STOCK


def test_rows_that_are_wrong_without_padding_alone_keep_it_and_the_fused_head(tmp_path, told, monkeypatch):
    layouts, original = [], engine.compute_logps

    def compute_logps(request, options, *args):
        if torch.is_grad_enabled():
            layouts.append((options.packed, len(args[0].input_ids)))
        result = original(request, options, *args)
        return dataclasses.replace(result, logps=result.logps + 0.01) if options.packed else result

    monkeypatch.setattr(engine, "compute_logps", compute_logps)
    trainer, _ = train(tmp_path, fused_max_tokens_per_forward=10_000)
    assert trainer._fused.ladder.level == Level.HEAD
    assert layouts == [(False, 4)] * 12  # from the first step on: it is compared before it is trained on
    assert [line.split(" ")[1] for line in told() if line.startswith("Level")] == ["head"]


def test_log_probs_that_are_not_numbers_are_told(tmp_path, told, monkeypatch):
    original = trl_compat.call_trl_logps

    def call_trl(*args, **kwargs):
        logps, *others = original(*args, **kwargs)
        return logps if torch.is_grad_enabled() else torch.full_like(logps, torch.nan), *others

    monkeypatch.setattr(trl_compat, "call_trl_logps", call_trl)
    trainer, _ = train(tmp_path, max_steps=1)
    assert trainer._fused.ladder.level == Level.STOCK
    assert "by nan nats" in told()[0]


def test_bfloat16_is_judged_by_its_own_rounding(tmp_path, told):
    model = tiny_model("llama").to(torch.bfloat16)
    model.config._name_or_path = str(tmp_path)
    _, log = train(tmp_path, model=model, max_steps=1, fused_verify=1)
    assert log[0][ERROR] < checks.BOUNDS[torch.bfloat16]
    assert not told()


# Where nothing is compared


class Counting(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.calls = mlp, []

    def forward(self, hidden):
        self.calls.append((tuple(hidden.shape), torch.is_grad_enabled()))
        return self.mlp(hidden)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fused", [{}, {"fused_verify": 1}, {"fused_verify": 1, "fused_layout": "packed"}], ids=str)
def test_unknown_code_is_called_as_often_as_in_stock(tmp_path, told, fused):
    calls = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        model = tiny_model("llama")
        model.model.layers[0].mlp = part = Counting(model.model.layers[0].mlp)
        _, log = train(tmp_path, cls=cls, model=model, **(fused if cls is FusedGRPOTrainer else {}))
        calls.append(part.calls)
    assert len(calls[0]) == len(calls[1])
    assert not [entry for entry in log if ERROR in entry]
    effects = [line for line in told() if "has no effect" in line]
    assert len(effects) == ("fused_verify" in fused)
    assert all("fused_verify=1 has no effect, because code of the model that is not known" in line for line in effects)


def test_an_adapter_on_the_head_is_compared_where_trl_runs_it(tmp_path, told):
    _, log = train(tmp_path, max_steps=1, fused_verify=1, peft_config=lora(target_modules=["lm_head"]))
    if trl_compat.REFUSES_ADAPTER_ON_HEAD:
        assert ERROR not in log[0]
        assert [line for line in told() if "leaves out an adapter" in line]
    else:
        assert log[0][ERROR] <= 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [0, 1], ids=["first step", "fused_verify"])
def test_a_training_goes_on_where_trls_own_path_has_no_memory(tmp_path, told, monkeypatch, every):
    expected, _ = train(tmp_path)
    call_trl = mock.Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr(trl_compat, "call_trl_logps", call_trl)
    trainer, log = train(tmp_path, fused_verify=every)
    weights = dict(expected.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.model.named_parameters())
    assert not [entry for entry in log if ERROR in entry]
    assert call_trl.call_count == 1
    line = "fused_verify=1 has no effect, because there is no memory for TRL's own path."
    assert told() == ([line] if every else [])
    assert trainer._fused.ladder.level == Level.WINDOW


# The bound


def _legacy(on):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def _by_words(on):  # says nothing of convolutions
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def _of_everything(on):  # as transformers' `tf32` does
    for operation in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        operation.fp32_precision = "none"  # a test before may have said something of these alone
    torch.backends.fp32_precision = "tf32" if on else "ieee"


def _of_each(on):
    for operation in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        operation.fp32_precision = "tf32" if on else "ieee"


def _what_is_tf32(switch):
    found = []
    for on in (True, False):
        switch(on)
        found.append(torch_compat.matmuls_are_tf32())
    return found


@pytest.mark.parametrize("switch", [_legacy, _by_words, _of_everything, _of_each])
def test_tf32_is_known_whichever_of_torchs_switches_was_used(switch):
    if switch in (_of_everything, _of_each) and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch < 2.9")
    # In a process of its own: torch refuses to be asked by one kind of switch once another was used
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_what_is_tf32, [switch]) == [True, False]
