"""What a generation batch gets at the highest level trains what stock trains; where it may not, it is left."""

from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig
from trl import GRPOTrainer

from tests.harness.models import tiny_model
from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest
from trl_fused_grpo.parity.tiny import VOCAB_SIZE
from trl_fused_grpo.training.plan import (
    why_forwards_are_not_shared,
    why_forwards_differ,
    why_old_logps_are_needed,
    why_reference_is_not_regrouped,
)

from .sampler import use_sampler


def train(tmp_path, cls, **options):
    """Train with sampling log-probs; weights, log entries, and for each forward whether it had gradients enabled."""
    trainer = make_trainer(
        tmp_path,
        cls,
        **{"max_steps": 2, "gradient_accumulation_steps": 4, "optim": "sgd", "learning_rate": 0.1, **options},
    )
    use_sampler(trainer)
    forwards = []
    call = FusedRequest.__call__

    def spy(self, causal_lm, **model_inputs):
        forwards.append(torch.is_grad_enabled())
        return call(self, causal_lm, **model_inputs)

    with mock.patch.object(FusedRequest, "__call__", spy):  # a hook on the model would turn faster paths off
        trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry], forwards


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "fused_options",
    [{}, {"fused_max_tokens_per_forward": 0}, {"fused_max_tokens_per_forward": 10_000}, {"fused_layout": "padded"}],
    ids=["packed", "micro-batches-alone", "one-forward", "padded"],
)
@pytest.mark.parametrize("mode", MODES)
def test_an_accumulation_window_without_old_log_probs_trains_and_logs_as_stock(
    tmp_path, unchecked, mode, fused_options
):
    options = {"vllm_importance_sampling_mode": mode}
    expected, expected_log, _ = train(tmp_path, GRPOTrainer, **options)
    weights, log, forwards = train(tmp_path, FusedGRPOTrainer, **fused_options, **options)
    assert all(forwards)  # no forward without gradient: the old log-probs were never computed
    for name, weight in expected.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    for fused_entry, stock_entry in zip(log, expected_log, strict=True):
        for name in SAMPLING_METRICS:
            assert fused_entry[name] == pytest.approx(stock_entry[name], rel=1e-4), name
        assert fused_entry.keys() - stock_entry.keys() == {"fused/rows_recomputed"}
        assert fused_entry["fused/rows_recomputed"] == 0.0  # the forecast knows the ratio, of a sequence too
        assert not stock_entry.keys() - fused_entry.keys()


@pytest.mark.parametrize("option", ["fused_skip_old_logps", "fused_share_prompts"])
def test_each_option_can_be_switched_off_and_trains_the_same(tmp_path, unchecked, option):
    expected, _, _ = train(tmp_path, FusedGRPOTrainer)
    weights, log, forwards = train(tmp_path, FusedGRPOTrainer, **{option: False})
    assert all(relative_error(weights[name], weight) < 1e-5 for name, weight in expected.items())
    assert all(name in log[0] for name in SAMPLING_METRICS)
    assert all(forwards) == (option != "fused_skip_old_logps")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.5, 1.5), (0.5, None)])
def test_ratios_keep_both_bounds_and_are_one_for_tokens_without_a_sampling_log_prob(mode, low, high):
    correction = SamplingCorrection(mode, low, high, nan_ratio_is_one=True)
    logps = torch.tensor([[0.0, 1.0, -1.0, 0.2, 7.0]])
    sampling = torch.tensor([[0.0, 0.0, 0.0, float("nan"), 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    ratio = correction.ratio(logps, sampling, mask)
    log_ratios = [0.0] if mode.startswith("sequence") else [0.0, 1.0, -1.0, 0.0, 0.0]
    expected = []
    for value in torch.tensor(log_ratios).exp().tolist():
        too_low, too_high = low is not None and value < low, high is not None and value > high
        if mode.endswith("mask"):
            expected.append(0.0 if too_low or too_high else value)
        else:
            expected.append(low if too_low else high if too_high else value)
    assert ratio.tolist() == [pytest.approx(expected)]


def test_one_reason_below_the_highest_level_leaves_everything_that_defers_or_shares(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, num_iterations=2, gradient_accumulation_steps=2)
    asked = (
        lambda: why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True),
        lambda: why_old_logps_are_needed(trainer, trainer._fused.ladder.findings),
        lambda: why_reference_is_not_regrouped(trainer, trainer._fused.ladder.findings, True),
    )
    trainer.model.train()
    assert [ask() for ask in asked] == [None] * 3
    trainer.accelerator.backward = lambda loss, **kwargs: loss.backward()
    trainer._fused.look()
    (reason,) = {ask() for ask in asked}
    assert "Accelerator.backward" in reason


def test_a_checkpoint_in_the_middle_of_a_generation_batch_resumes(tmp_path):
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, max_steps=1, **options).train()
    resumed = make_trainer(tmp_path, max_steps=3, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.state.global_step == 3
    logged = {name for entry in resumed.state.log_history for name in entry}
    assert {"num_tokens", "step_time", "reward", "entropy", "fused/rows_recomputed"} <= logged


def test_noise_that_a_class_of_modules_has_is_seen(tmp_path, monkeypatch):
    model = make_trainer(tmp_path).model
    model.train()
    assert why_forwards_differ(model) is None
    monkeypatch.setattr(type(model.get_input_embeddings()), "neftune_noise_alpha", 5.0, raising=False)
    assert why_forwards_differ(model) == "NEFTune's noise makes two forwards differ"


@pytest.mark.parametrize("noise", ["lora", "residual", "attention", "neftune"])
def test_old_log_probs_are_computed_where_two_forwards_draw_different_random_numbers(tmp_path, noise):
    """Stock's ratio, which is clipped, then compares two draws."""
    options = {}
    if noise == "lora":
        pytest.importorskip("peft")
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    if noise in ("residual", "attention"):
        probability = {"resid_pdrop": 0.1} if noise == "residual" else {"attn_pdrop": 0.1}
        sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        options["model"] = AutoModelForCausalLM.from_config(GPT2Config(**sizes, **{**none, **probability}))
    trainer = make_trainer(tmp_path, **options)
    trainer.use_vllm = True
    trainer.model.train()
    if noise == "neftune":
        trainer.model.get_input_embeddings().neftune_noise_alpha = 5.0
    assert "makes two forwards differ" in why_old_logps_are_needed(trainer, trainer._fused.ladder.findings)
    plain = make_trainer(tmp_path)
    plain.use_vllm = True
    plain.model.train()
    assert why_old_logps_are_needed(plain, plain._fused.ladder.findings) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        ("LoHaConfig", {"r": 4, "rank_dropout": 0.5, "init_weights": False}),
        ("LoKrConfig", {"r": 4, "module_dropout": 0.5, "init_weights": False}),
        ("BOFTConfig", {"boft_block_size": 4, "boft_dropout": 0.5, "init_weights": False}),
        ("OFTConfig", {"oft_block_size": 4, "r": 0, "module_dropout": 0.5, "init_weights": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dropout_of_an_adapter_s_own_makes_forwards_differ(tmp_path, adapter, options):
    peft = pytest.importorskip("peft")

    def model_with(**options):
        config = getattr(peft, adapter)(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        return make_trainer(tmp_path, peft_config=config).model.train()

    assert "makes two forwards differ" in why_forwards_differ(model_with(**options))
    assert why_forwards_differ(model_with(**options).eval()) is None
    without = {name: 0.0 if "dropout" in name else value for name, value in options.items()}
    assert why_forwards_differ(model_with(**without)) is None


def test_importance_ratios_of_an_adapter_that_drops_out_are_stock_s(tmp_path):
    """PEFT keeps the probability in a module that is not torch's dropout."""
    peft = pytest.importorskip("peft")
    config = {"boft_block_size": 4, "boft_dropout": 0.5, "init_weights": False, "target_modules": ["q_proj"]}
    options = {"fused_layout": "padded", "fused_max_tokens_per_forward": 0}

    def trained(cls, **more):
        torch.manual_seed(0)  # older TRL draws the adapter's weights before it sets its own
        return train(tmp_path, cls, peft_config=peft.BOFTConfig(**config, task_type="CAUSAL_LM"), **more)

    (fused, log, _), (stock, stock_log, _) = trained(FusedGRPOTrainer, **options), trained(GRPOTrainer)
    for entry, stock_entry in zip(log, stock_log, strict=True):
        for name in ("loss", "grad_norm", "sampling/importance_sampling_ratio/mean"):
            assert entry[name] == pytest.approx(stock_entry[name], rel=1e-4), name
    assert all(relative_error(fused[name], weight) < 1e-5 for name, weight in stock.items())


def test_a_disabled_adapter_draws_nothing_but_the_model_may(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, peft_config=config, beta=0.1)
    trainer.model.train()
    assert "dropout" in why_forwards_differ(trainer.model)
    assert why_forwards_differ(trainer.model, with_adapters=False) is None
    assert why_reference_is_not_regrouped(trainer, trainer._fused.ladder.findings, True) is None
    trainer.model.config.attention_dropout = 0.1
    assert "attention_dropout" in why_reference_is_not_regrouped(trainer, trainer._fused.ladder.findings, True)
    trainer.ref_model = make_trainer(tmp_path).model  # it evaluates, and so draws nothing
    assert why_reference_is_not_regrouped(trainer, trainer._fused.ladder.findings, True) is None


def test_dropout_of_heads_that_a_model_lacks_does_not_make_forwards_differ():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    neox = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, intermediate_size=32)).train()
    gpt2 = tiny_model("gpt2").train()
    assert neox.config.classifier_dropout > 0
    assert gpt2.config.summary_first_dropout > 0
    assert why_forwards_differ(neox) is None
    assert why_forwards_differ(gpt2) is None
    gpt2.config.attn_pdrop = 0.1
    assert "attn_pdrop" in why_forwards_differ(gpt2)


@pytest.mark.parametrize(("kind", "differs"), [("phimoe", True), ("moe", False)])
def test_forwards_differ_where_a_router_samples(kind, differs):
    model = tiny_model(kind).train()
    reason = "the sampling of its router makes two forwards differ" if differs else None
    assert why_forwards_differ(model) == reason
    assert why_forwards_differ(model.eval()) is None
