"""One tiny model of each family and each kind of head: loss and every gradient are stock TRL's."""

import dataclasses

import pytest
import torch
import transformers

from trl_fused_grpo import read_lm_head
from trl_fused_grpo._compat.trl import RETURNS_AUX_LOSS
from trl_fused_grpo.parity import MODEL_CASES, Settings, compare
from trl_fused_grpo.parity.run_case import make_data, run_case
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.parity.tiny.families import FAMILIES, VARIANTS, Family
from trl_fused_grpo.parity.trainers import fused_trainer, initial_weights, load_weights, stock_trainer


CASES = {case.name: case for case in MODEL_CASES}


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_stocks(tmp_path, name):
    result = compare(CASES[name], Settings(tmp_path))
    assert result.verdict == "equal", result.reason
    assert result.recomputed == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_stocks_on_policy(tmp_path, name):
    case = CASES[name]
    result = compare(dataclasses.replace(case, data=dataclasses.replace(case.data, old=None)), Settings(tmp_path))
    assert result.verdict == "equal", result.reason
    assert result.recomputed == 0


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_the_head_finds_its_scale_and_softcap(name):
    family = {**FAMILIES, **VARIANTS}[name]
    head = read_lm_head(tiny_model(name))
    assert (head.logit_scale, head.softcap) == (family.scale, family.softcap)


def played(folder, case):
    """What the fused trainer makes of a case."""
    settings = Settings(folder)
    start = initial_weights(case, settings)
    data = make_data(case, load_weights(stock_trainer(case, settings), start), seed=0)
    return run_case(load_weights(fused_trainer(case, settings), start), case, data, torch.float32)


@pytest.mark.skipif(not RETURNS_AUX_LOSS, reason="this TRL has no auxiliary loss")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "jamba"])
def test_experts_are_balanced(tmp_path, name):
    assert ("aux_loss" in played(tmp_path, CASES[name]).metrics) == FAMILIES[name].has_aux_loss


# What a case is there for must receive a gradient, or the case shows nothing
SHOWN = {
    "qwen2.5-vl": "visual.blocks",
    "gemma3-vl": "vision_tower",
    "mamba2": "A_log",
    "gpt-oss": "sinks",
    "head-bias": "lm_head.bias",
    "head-lora": "lm_head.lora_B",
    "head-modules-to-save": "lm_head.modules_to_save",
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_case_is_about_is_trained(tmp_path, name):
    tensors = {n: gradient for n, gradient in played(tmp_path, CASES[name]).tensors.items() if SHOWN[name] in n}
    assert tensors
    assert any(gradient.norm() > 1e-4 for gradient in tensors.values())


def test_a_family_that_transformers_lacks_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "cohere", Family("NoSuchConfig"))
    result = compare(CASES["cohere"], Settings(tmp_path))
    assert (result.verdict, result.reason) == ("skipped", "this transformers has no NoSuchConfig")


def test_parameters_with_a_flat_gradient_are_frozen(tmp_path):
    outcome = played(tmp_path, dataclasses.replace(CASES["gemma3-vl"], frozen=()))
    flat = [gradient for name, gradient in outcome.tensors.items() if name.endswith(FAMILIES["gemma3-vl"].flat)]
    assert flat
    assert all(gradient.norm() < 1e-8 * outcome.norm for gradient in flat)


@pytest.mark.parametrize(
    ("config", "option"), [("RecurrentGemmaConfig", "logits_soft_cap"), ("xLSTMConfig", "output_logit_soft_cap")]
)
def test_a_softcap_has_other_names_too(config, option):
    config = getattr(transformers, config)()
    head = type("Model", (), {"config": config, "get_output_embeddings": lambda self: torch.nn.Linear(2, 3)})()
    assert read_lm_head(head).softcap == getattr(config, option)
