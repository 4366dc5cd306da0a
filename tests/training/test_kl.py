"""`kl_estimator` changes the KL term of the trainer's loss and nothing else."""

import pytest
import torch
import trl
from trl import GRPOConfig, GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import dense_log_probs, loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer, patch
from trl_fused_grpo._compat.trl import TRL
from trl_fused_grpo.training import checks
from trl_fused_grpo.training import state as state_module


def inputs_with_reference(trainer):
    """A micro-batch whose old and reference log-probs lie around the current ones."""
    inputs = make_inputs()
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 8)[0]
    generator = torch.Generator().manual_seed(6)
    inputs["old_per_token_logps"] = logps + 0.1 * torch.randn(logps.shape, generator=generator)
    inputs["ref_per_token_logps"] = logps + 0.3 * torch.randn(logps.shape, generator=generator)
    return inputs


def logged_kl(trainer, mode):
    (values,) = [values for name, values in trainer._metrics[mode].items() if name.startswith("kl/k3")]
    return values


LOSSES = {
    "dapo": {},
    "dapo-two-windows-a-generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "grpo": {"loss_type": "grpo"},
    "grpo-sequence-level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo-accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 3},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "bias-corrected": {"use_bias_correction_kl": True},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_the_k3_term_that_is_computed_here_equals_trls(tmp_path, monkeypatch, name, is_training):
    if name == "luspo" and TRL.release < (0, 28):
        pytest.skip("this TRL has no LUSPO")
    options = {"beta": 0.2, **LOSSES[name]}
    stock = make_trainer(tmp_path, GRPOTrainer, **options)
    fused = make_trainer(tmp_path, **options)
    inputs = inputs_with_reference(stock)
    monkeypatch.setattr(state_module, "replaces_kl", lambda trainer, name: True)
    if not is_training:
        losses = []
        for trainer in (stock, fused):
            trainer.model.eval()  # before any training, which counts micro-batches
            with torch.no_grad():
                losses.append(trainer.compute_loss(trainer.model, dict(inputs)))
        assert relative_error(losses[1], losses[0]) < 1e-5
        assert logged_kl(fused, "eval") == pytest.approx(stock._metrics["eval"]["kl"], rel=1e-4)
        return
    (loss, gradients), (fused_loss, fused_gradients) = (loss_and_gradients(t, inputs) for t in (stock, fused))
    assert relative_error(fused_loss, loss) < 1e-5
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())
    assert logged_kl(fused, "train") == pytest.approx(stock._metrics["train"]["kl"], rel=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k4"])
@pytest.mark.parametrize("old_logps", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("corrected", [True, False], ids=["bias-corrected", "uncorrected"])
def test_an_estimator_adds_its_own_term_with_forecast_gradients(tmp_path, estimator, old_logps, corrected):
    plain = make_trainer(tmp_path)
    inputs = inputs_with_reference(plain)
    if not old_logps:
        del inputs["old_per_token_logps"]
    loss, gradients = loss_and_gradients(plain, inputs)
    fused = make_trainer(tmp_path, beta=0.2, kl_estimator=estimator, use_bias_correction_kl=corrected)
    fused_loss, fused_gradients = loss_and_gradients(fused, inputs)
    assert (fused.fused_stats.backward, fused.fused_stats.recomputed) == ("forecast", 0)
    assert fused.beta == 0.2

    # The difference of the two losses is the KL term alone; the expected one comes from logits in float64
    model = plain.model.double()
    model.zero_grad()
    logps, _ = dense_log_probs(model, inputs)
    log_ratio_to_reference = logps - inputs["ref_per_token_logps"]
    ratio = (logps - inputs.get("old_per_token_logps", logps.detach())).exp()
    kl = {"k1": log_ratio_to_reference, "k2": log_ratio_to_reference**2 / 2, "k4": log_ratio_to_reference}[estimator]
    kl = kl * ratio if corrected or estimator == "k4" else kl
    name = {"k1": "k4", "k2": "k2_bias_corrected", "k4": "k4"}[estimator] if corrected else estimator
    term = 0.2 * (kl * inputs["completion_mask"]).sum() / inputs["num_items_in_batch"]
    term.backward()
    assert (fused_loss - loss).item() == pytest.approx(term.item(), rel=1e-4)
    for parameter_name, parameter in model.named_parameters():
        difference = fused_gradients[parameter_name] - gradients[parameter_name]
        assert relative_error(difference, parameter.grad) < 1e-4, parameter_name
    (logged,) = fused._metrics["train"][f"kl/{name}"]
    mean = (kl * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()
    assert logged == pytest.approx(mean.item(), rel=1e-4)
    assert [metric for metric in fused._metrics["train"] if metric.startswith("kl")] == [f"kl/{name}"]


def test_an_unknown_estimator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kl_estimator must be"):
        FusedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, kl_estimator="k5")


@pytest.fixture
def warnings_logged(monkeypatch):
    """What is logged with `warning_once`, each time that it is called."""
    messages = []
    monkeypatch.setattr(checks.logger, "warning_once", messages.append, raising=False)
    return messages


def test_an_estimator_that_a_patch_asks_for_is_trained(tmp_path):
    own = make_trainer(tmp_path, beta=0.2, kl_estimator="k2")
    inputs = inputs_with_reference(own)
    with patch(kl_estimator="k2"):
        patched = make_trainer(tmp_path, trl.GRPOTrainer, config=GRPOConfig, beta=0.2)
    expected, (loss, gradients) = loss_and_gradients(own, inputs), loss_and_gradients(patched, inputs)
    assert loss == expected[0] and gradients.keys() == expected[1].keys()
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert patched._metrics["train"]["kl/k2"] == own._metrics["train"]["kl/k2"]
    assert loss != loss_and_gradients(make_trainer(tmp_path, beta=0.2), inputs)[0]


class OwnObjective(FusedGRPOTrainer):
    """A trainer that changes the loss."""

    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


def test_an_estimator_that_would_not_be_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"use_liger_loss=False.*kl_estimator='k1'.*use_liger_loss=True"):
        make_trainer(tmp_path, beta=0.1, kl_estimator="k1", use_liger_loss=False)
    with pytest.raises(ValueError, match=r"kl_estimator='k1' does not reach .*_compute_loss"):
        make_trainer(tmp_path, OwnObjective, beta=0.1, kl_estimator="k1")
    make_trainer(tmp_path, OwnObjective, beta=0.1, kl_estimator="k3")


def test_an_estimator_set_after_construction_is_refused_with_an_objective_of_the_users(tmp_path):
    trainer = make_trainer(tmp_path, OwnObjective, beta=0.1)
    inputs = inputs_with_reference(trainer)
    trainer.args.kl_estimator = "k1"
    with pytest.raises(ValueError, match="set kl_estimator='k3'"):
        loss_and_gradients(trainer, inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cls", [FusedGRPOTrainer, OwnObjective])
def test_the_log_says_that_an_estimator_has_no_effect_without_a_kl_term(tmp_path, warnings_logged, cls):
    trainer = make_trainer(tmp_path, cls, beta=0.0, kl_estimator="k1", max_steps=1)
    assert warnings_logged == ["kl_estimator='k1' has no effect, because beta=0.0 leaves the KL term out."]
    trainer.train()


@pytest.mark.parametrize(("estimator", "computed"), [("k1", "k4"), ("k2", "k2_bias_corrected"), ("k4", None)])
def test_the_log_says_what_the_bias_correction_makes_of_an_estimator(tmp_path, warnings_logged, estimator, computed):
    make_trainer(tmp_path, beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True)
    if computed is None:
        assert warnings_logged == []
        return
    (message,) = warnings_logged
    assert f"kl_estimator={estimator!r} then is {computed!r}" in message and "use_bias_correction_kl=False" in message


def test_the_default_is_trls_own_term(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.2)
    assert not state_module.replaces_kl(trainer, trainer._fused.engine.kl_estimator)


def test_a_loss_type_that_is_not_known_keeps_trls_estimator(tmp_path):
    trainer = make_trainer(tmp_path, FusedGRPOTrainer, beta=0.1, kl_estimator="k2")
    trainer.loss_type = "of a newer release"
    with pytest.raises(ValueError, match="how loss_type='of a newer release' is averaged: set kl_estimator='k3'"):
        checks.check_kl_estimator(trainer, "k2")
