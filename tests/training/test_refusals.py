"""Bad input raises an error that says what to change; input that is odd but legitimate gives finite results."""

import pytest
import torch
from packaging.version import Version
from transformers import LlamaModel

from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOConfig, read_lm_head
from trl_fused_grpo._compat import required
from trl_fused_grpo.parity.tiny import model_config


def test_the_constructor_refuses_a_model_without_output_projection(tmp_path):
    with pytest.raises(ValueError, match=r"no output projection.*use_liger_loss=False"):
        make_trainer(tmp_path, model=LlamaModel(model_config("llama")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("completion_mask", torch.ones(4, 7, dtype=torch.long)),
        ("tool_mask", torch.ones(3, 8, dtype=torch.long)),
        ("advantages", torch.ones(5)),
        ("old_per_token_logps", torch.zeros(4, 9)),
        ("importance_sampling_ratio", torch.ones(8, 1)),
    ],
)
def test_a_tensor_of_the_wrong_shape_raises_with_both_shapes(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"{name} has shape \[{value.shape[0]}.*\[4, 8\]"):
        loss_and_gradients(make_trainer(tmp_path), make_inputs(**{name: value}))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_an_all_masked_micro_batch_gives_zero_and_its_backward_works(tmp_path, loss_type):
    inputs = make_inputs()
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    loss, gradients = loss_and_gradients(make_trainer(tmp_path, loss_type=loss_type), inputs)
    assert loss.item() == 0.0
    assert sorted(gradients) and all(g.count_nonzero() == 0 and g.isfinite().all() for g in gradients.values())


def test_a_completion_without_tokens_leaves_the_gradients_of_the_others(tmp_path):
    inputs = make_inputs()
    inputs["completion_mask"][2] = 0
    loss, gradients = loss_and_gradients(make_trainer(tmp_path), inputs)
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients.values())
    assert gradients["lm_head.weight"].count_nonzero() > 0


def test_the_constructor_refuses_a_forced_forecast_for_an_objective_without_one(tmp_path):
    with pytest.raises(ValueError, match="leave fused_backward out"):
        make_trainer(tmp_path, fused_backward="forecast", top_entropy_quantile=0.2)


@pytest.mark.parametrize(("option", "value"), [("fused_backward", "fast"), ("fused_logits_mib", 0)])
def test_the_config_refuses_an_impossible_option(tmp_path, option, value):
    with pytest.raises(ValueError, match=option):
        FusedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{option: value})


def test_a_head_without_weights_in_memory_is_refused():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config("llama"))
    with pytest.raises(ValueError, match="quantization and offloading"):
        read_lm_head(model)


def test_an_older_trl_is_refused_naming_the_versions():
    with pytest.raises(ImportError, match=r"TRL 0\.26\.0.*trl>=0\.27\.2,<=1\.16\.0"):
        required.check_trl(version=Version("0.26.0"))


def test_a_trl_without_its_log_prob_method_is_refused_by_the_methods_name():
    class TrainerWithoutLogps:
        compute_loss = _compute_loss = training_step = None

    with pytest.raises(ImportError, match="_get_per_token_logps_and_entropies"):
        required.check_trl(TrainerWithoutLogps)


def test_a_newer_trl_is_warned_about(monkeypatch):
    monkeypatch.setattr(required, "NEWEST_TRL", Version("0.27.1"))
    with pytest.warns(UserWarning, match="newer"):
        required.check_trl()


def test_a_supported_trl_is_not_warned_about(recwarn):
    required.check_trl()
    assert not [w for w in recwarn if "trl_fused_grpo" in str(w.message)]
