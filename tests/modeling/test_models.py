"""One tiny model of each family and each kind of head: loss and every gradient are stock TRL's."""

import dataclasses

import pytest
import torch
import transformers
from packaging.version import Version

from tests import harness
from tests.harness.models import model_config, tiny_model
from tests.harness.random_cases import name_of, random_case
from trl_fused_grpo import read_lm_head
from trl_fused_grpo._compat.models import PADDING_MATTERS, TRANSFORMERS
from trl_fused_grpo._compat.trl import LOGPS_FROM_LOGITS, RETURNS_AUX_LOSS
from trl_fused_grpo.parity import MODEL_CASES, Settings, compare
from trl_fused_grpo.parity.cases import FAMILY_CASES, _of_family
from trl_fused_grpo.parity.compare import Comparison
from trl_fused_grpo.parity.run_case import run_case
from trl_fused_grpo.parity.tiny.batches import make_data
from trl_fused_grpo.parity.tiny.families import FAMILIES, VARIANTS, Family
from trl_fused_grpo.parity.trainers import fused_trainer, load_weights, noisy_weights, stock_trainer


CASES = {case.name: case for case in MODEL_CASES}
FAMILY_CASES = [case.name for case in FAMILY_CASES]


def compared(case, folder):
    """The result of a case, which is equal; the test is skipped where transformers or stock has not got so far."""
    result = compare(case, Settings(folder))
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert result.verdict == "equal", result.reason
    assert result.recomputed == 0
    return result


def built(name):
    """A tiny model; the test is skipped where transformers lacks it."""
    try:
        return tiny_model(name)
    except ImportError as missing:
        pytest.skip(str(missing))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_stocks(tmp_path, name):
    compared(CASES[name], tmp_path)


@pytest.mark.parametrize("name", ["Electra", "Inkling", "ModernBertDecoder", "ProphetNet"])
def test_logits_that_come_from_more_than_the_head_are_stocks(tmp_path, name):
    """Before TRL 1.15 they are those of the model's own forward, afterwards those of its head alone."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip("this transformers has no such family")
    case = random_case(name_of({"model": f"census:{name}ForCausalLM", "old": "far"}))
    assert harness.compare(case, Settings(tmp_path)).verdict == "equal"


@pytest.mark.parametrize("name", ["apertus-1.5", "dory", "lara-mini"])
def test_the_newest_families_are_packed_and_as_in_stock(tmp_path, name):
    built(name)
    assert compared(_of_family(name, name, VARIANTS[name], None), tmp_path).layout == "packed"


@pytest.mark.sample(6)
@pytest.mark.skipif(Version("5.21.0") > TRANSFORMERS, reason="older models hand less on to their layers")
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_rows_are_laid_out_at_best(tmp_path, name):
    """On-policy, and every row has a prompt of its own."""
    case = CASES[name]
    data = dataclasses.replace(case.data, old=None, repeated_prompts=False)
    layout = compared(dataclasses.replace(case, data=data), tmp_path).layout
    is_padded = model_config(case.model).model_type in PADDING_MATTERS
    assert layout == ("padded" if is_padded else "packed")


@pytest.mark.skipif(Version("5.24.0") > TRANSFORMERS, reason="families that are newer than this transformers")
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_no_family_is_skipped_with_the_newest_transformers(name):
    assert model_config(name)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_the_head_finds_its_scale_and_softcap(name):
    family = {**FAMILIES, **VARIANTS}[name]
    head = read_lm_head(built(name))
    assert (head.logit_scale, head.softcap) == (family.scale, family.softcap)


def played(folder, case):
    """What the fused trainer makes of a case; the test is skipped where transformers lacks the model."""
    built(case.model)
    settings = Settings(folder)
    stock = stock_trainer(case, settings)
    start = noisy_weights(stock, case.noise)
    data = make_data(case, load_weights(stock, start), seed=0)
    return run_case(load_weights(fused_trainer(case, settings), start), case, data, torch.float32)


@pytest.mark.sample(3)
@pytest.mark.skipif(not RETURNS_AUX_LOSS, reason="this TRL has no auxiliary loss")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "jamba", "deepseek-v3", "qwen3.5-moe"])
def test_experts_are_balanced(tmp_path, name):
    assert ("aux_loss" in played(tmp_path, CASES[name]).metrics) == FAMILIES[name].has_aux_loss


# What a case is there for must receive a gradient, or the case shows nothing
SHOWN = {
    "qwen2.5-vl": "visual.blocks",
    "qwen3-vl": "deepstack_merger",
    "qwen3.5": "A_log",
    "glm4.5v": "visual.merger",
    "gemma3-vl": "vision_tower",
    "gemma3n": "per_layer_model_projection",
    "gemma4": "vision_tower",
    "gemma4-text": "per_layer_model_projection",
    "mistral3": "vision_tower",
    "llava": "vision_tower",
    "internvl": "vision_tower",
    "mamba2": "A_log",
    "nemotron-h": "A_log",
    "granite-4": "A_log",
    "qwen3-next": "A_log",
    "olmo-hybrid": "A_log",
    "kimi-linear": "A_log",
    "zamba2": "adapter_list",
    "lfm2": "conv.conv",
    "deepseek-v3": "kv_a_proj",
    "gpt-oss": "sinks",
    "head-bias": "lm_head.bias",
    "head-lora": "lm_head.lora_B",
    "head-modules-to-save": "lm_head.modules_to_save",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHOWN)
def test_what_a_case_is_about_is_trained(tmp_path, name):
    _skip_where_stock_may_fail(name)
    tensors = {n: gradient for n, gradient in played(tmp_path, CASES[name]).tensors.items() if SHOWN[name] in n}
    assert tensors
    assert any(gradient.norm() > 1e-4 for gradient in tensors.values())


def _skip_where_stock_may_fail(name):
    if CASES[name].stock_fails and Version("5.21.0") > TRANSFORMERS:
        pytest.skip(f"stock may fail here: {CASES[name].stock_fails}")


def test_a_family_that_transformers_lacks_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "cohere", Family("NoSuchConfig"))
    result = compare(CASES["cohere"], Settings(tmp_path))
    assert (result.verdict, result.reason) == ("skipped", "this transformers has no NoSuchConfig")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.flat])
def test_parameters_with_a_flat_gradient_are_frozen(tmp_path, name):
    _skip_where_stock_may_fail(name)
    outcome = played(tmp_path, dataclasses.replace(CASES[name], frozen=()))
    flat = [gradient for key, gradient in outcome.tensors.items() if key.endswith(FAMILIES[name].flat)]
    assert flat
    assert all(gradient.norm() < 1e-8 * outcome.norm for gradient in flat)


def failing(*args, **kwargs):
    raise RuntimeError("there is no such thing as a hat")


def test_a_case_is_skipped_where_stock_fails_as_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(Comparison, "stock_trainer", staticmethod(failing))
    result = compare(dataclasses.replace(CASES["llama"], stock_fails=("no such thing",)), Settings(tmp_path))
    assert (result.verdict, result.reason) == (
        "skipped",
        "stock itself fails: RuntimeError: there is no such thing as a hat",
    )
    for other in ((), ("no such word",)):
        assert compare(dataclasses.replace(CASES["llama"], stock_fails=other), Settings(tmp_path)).verdict == "failed"


def test_a_case_is_not_skipped_where_the_fused_trainer_fails_so(tmp_path):
    settings = Settings(tmp_path, fused_class=failing)
    assert compare(dataclasses.replace(CASES["llama"], stock_fails=("no such thing",)), settings).verdict == "failed"


@pytest.mark.parametrize(
    ("family", "option"), [("RecurrentGemma", "logits_soft_cap"), ("xLSTM", "output_logit_soft_cap")]
)
def test_a_softcap_has_other_names_too(family, option):
    config = getattr(transformers, f"{family}Config")()
    forward = getattr(transformers, f"{family}ForCausalLM").forward
    head = torch.nn.Linear(2, 3)
    members = {"config": config, "forward": forward, "get_output_embeddings": lambda self: head}
    # TRL computes log-probs from its own head since 1.15, which does not know them
    expected = getattr(config, option) if LOGPS_FROM_LOGITS else None
    assert read_lm_head(type("Model", (), members)()).softcap == expected
