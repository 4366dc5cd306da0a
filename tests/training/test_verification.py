"""`fused_verify` compares a micro-batch with TRL's own path, finds what is wrong, and changes nothing."""

import multiprocessing
from unittest import mock

import pytest
import torch

from tests.tiny_training import make_trainer
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.ops.precomputed_grads import PrecomputedGrads
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training import verification

from .sampler import use_sampler


ERRORS = ("fused/verify_loss", "fused/verify_head_grad")


def lora(**options):
    pytest.importorskip("peft")
    from peft import LoraConfig

    return LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})


def train(tmp_path, sampler=False, **options):
    """Train; the weights, and what was logged in each step without times."""
    torch.manual_seed(0)  # of adapters, which older TRL makes before it sets a seed
    trainer = make_trainer(tmp_path, **{"max_steps": 3, "gradient_accumulation_steps": 4, **options})
    if sampler:
        use_sampler(trainer)
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return weights, [{k: v for k, v in entry.items() if k != "step_time"} for entry in steps]


@pytest.fixture
def told(monkeypatch):
    """The warnings of a comparison."""
    warnings = mock.Mock()
    monkeypatch.setattr(verification.logger, "warning", warnings)
    monkeypatch.setattr("trl_fused_grpo.training.checks.logger.warning_once", warnings)
    return lambda: [call.args[0] for call in warnings.call_args_list]


@pytest.mark.parametrize(
    "options",
    [
        {"fused_max_tokens_per_forward": 10_000, "gradient_checkpointing": True},
        {"fused_layout": "aligned", "beta": 0.1, "kl_estimator": "k2", "loss_type": "grpo"},
        {"kind": "tied", "importance_sampling_level": "sequence", "fused_backward": "recompute"},
        {"adapter": {}, "beta": 0.1, "fused_max_tokens_per_forward": 10_000},
        {"sampler": True, "vllm_importance_sampling_mode": "sequence_truncate"},
        {"fused_skip_zero_grad_sequences": True, "loss_type": "cispo", "num_iterations": 2},
        {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 9.0, "gradient_accumulation_steps": 1},
    ],
    ids=["shared-forward", "aligned-k2", "tied-recompute", "lora", "deferred-ratio", "two-iterations", "adaptive"],
)
def test_a_comparison_finds_rounding_and_leaves_the_training_as_it_was(tmp_path, told, options):
    if "entropy_coef" in options and trl_compat.TRL.release < (1, 8):
        pytest.skip("this TRL has no entropy bonus")
    if "adapter" in options:
        options = {**options, "peft_config": lora(**options["adapter"])}
        del options["adapter"]
    expected, expected_log = train(tmp_path, **options)
    weights, log = train(tmp_path, **options, fused_verify=2)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    for entry, plain, is_verified in zip(log, expected_log, (True, False, True), strict=True):
        errors = [entry.pop(name) for name in ERRORS if name in entry]
        assert len(errors) == (2 if is_verified else 0)
        assert all(error <= 1e-5 for error in errors)
        assert entry == plain
    assert not [line for line in told() if "fused_verify" in line]


def test_an_adapter_on_the_head_is_compared_where_trl_runs_it(tmp_path, told):
    if trl_compat.REFUSES_ADAPTER_ON_HEAD:
        _, log = train(tmp_path, max_steps=1, fused_verify=1, peft_config=lora(target_modules=["lm_head"]))
        assert ERRORS[0] not in log[0]
        assert [line for line in told() if "leaves out an adapter" in line]
        return
    _, log = train(tmp_path, max_steps=1, fused_verify=1, peft_config=lora(target_modules=["lm_head"]))
    assert all(log[0][name] <= 1e-5 for name in ERRORS)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained head", "frozen head"])
def test_a_gradient_that_is_four_percent_off_is_warned_about(tmp_path, told, monkeypatch, is_frozen):
    name = "resolve_unit_grads" if is_frozen else "resolve_forecast_grads"
    right = getattr(PrecomputedGrads, name)

    def wrong(self, *args):
        return right(self, 1.04 * args[0], *args[1:])

    monkeypatch.setattr(PrecomputedGrads, name, wrong)
    _, log = train(tmp_path, max_steps=1, fused_verify=1, **({"peft_config": lora()} if is_frozen else {}))
    assert log[0][ERRORS[1]] == pytest.approx(0.04, rel=1e-2)
    (line,) = told()
    assert "in optimizer step 0" in line and "4.0e-02" in line and "float32" in line


def test_a_loss_that_is_off_is_warned_about(tmp_path, told, monkeypatch):
    trainer = make_trainer(tmp_path, max_steps=1, fused_verify=1)
    keep = trainer._fused.verification.keep
    monkeypatch.setattr(trainer._fused.verification, "keep", lambda *args: keep(*args[:2], args[2] + 0.1))
    trainer.train()
    (line,) = told()
    assert "the loss differs from that of TRL's own path by" in line


def test_bfloat16_is_judged_by_its_own_rounding(tmp_path, told):
    model = tiny_model("llama").to(torch.bfloat16)
    model.config._name_or_path = str(tmp_path)
    _, log = train(tmp_path, model=model, max_steps=1, fused_verify=1)
    assert all(log[0][name] < verification.BOUNDS[torch.bfloat16] for name in ERRORS)
    assert not told()


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
        found.append((torch_compat.matmuls_are_tf32(), torch_compat.convolutions_are_tf32()))
    return found


@pytest.mark.parametrize("switch", [_legacy, _by_words, _of_everything, _of_each])
def test_tf32_is_known_whichever_of_torchs_switches_was_used(switch):
    if switch in (_of_everything, _of_each) and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch < 2.9")
    # In a process of its own: torch refuses to be asked by one kind of switch once another was used
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_what_is_tf32, [switch]) == [(True, True), (False, False)]


def test_the_reason_for_no_comparison_is_told(tmp_path, told):
    _, log = train(tmp_path, max_steps=2, fused_verify=1, peft_config=lora(lora_dropout=0.1))
    assert not [name for entry in log for name in ERRORS if name in entry]
    assert any("fused_verify=1 has no effect, because dropout" in line for line in told())


def test_a_micro_batch_without_advantages_tells_nothing(tmp_path, told):
    trainer = make_trainer(tmp_path, max_steps=1, fused_verify=1, beta=0.1)
    trainer.reward_funcs = [lambda completion_ids, **_: [1.0] * len(completion_ids)]
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in ERRORS if name in entry]
    assert not told()


def test_a_training_goes_on_where_trls_own_path_has_no_memory(tmp_path, told, monkeypatch):
    expected, _ = train(tmp_path)
    call_trl = mock.Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr("trl_fused_grpo.training.state.trl_compat.call_trl_logps", call_trl)
    weights, log = train(tmp_path, fused_verify=1)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert not [name for entry in log for name in ERRORS if name in entry]
    assert call_trl.call_count == 1
    assert told() == ["fused_verify has no effect, because there is no memory for TRL's own path."]
