"""Which formula a modeling file's own attention function computes, and which kernel that gets."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.modeling.flash_emulation import HEADS, SHARED, arguments, emulated_forward, random_tensors
from tests.oracle import relative_error
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention import eager, eager_formula
from trl_fused_grpo.modeling.attention import flex as flex_kernel
from trl_fused_grpo.modeling.attention.flex import not_compiled


def own_function(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward


GIVEN = {"scaling": 0.1, "dropout": 0.0, "position_ids": torch.ones(1), "softcap": None}


@pytest.mark.parametrize(
    ("family", "module", "options", "expected"),
    [
        ("llama", SimpleNamespace(), {}, (False, False)),
        ("llama", SimpleNamespace(), {"softcap": 9.0}, (False, False)),  # it leaves out the cap
        ("gemma2", SimpleNamespace(), {}, (False, False)),
        ("gemma2", SimpleNamespace(), {"softcap": 9.0}, (True, False)),
        ("gpt_oss", SimpleNamespace(sinks=torch.ones(4)), {"s_aux": torch.ones(4)}, (False, True)),
        ("gpt_oss", SimpleNamespace(sinks=torch.ones(4)), {"scaling": None}, None),
    ],
)
def test_the_formula_of_a_model_s_own_function_is_found_by_numbers(family, module, options, expected):
    assert eager_formula.eager_formula(own_function(family), module, {**GIVEN, **options}) == expected


def reads_an_unknown_argument(module, query, key, value, mask, scaling, head_mask=None, **kwargs):
    output, _ = own_function("llama")(module, query, key, value, mask, scaling)
    return (output if head_mask is None else output * head_mask), None


def attends_otherwise(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value, mask, scaling * 2)


def detaches(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value.detach(), mask, scaling)


def reads_the_layer(module, query, key, value, mask, scaling, **kwargs):
    return own_function("llama")(module, query, key, value, mask, scaling * module.factor)


@pytest.mark.parametrize("function", [attends_otherwise, detaches, reads_the_layer])
def test_another_formula_is_not_known(function):
    assert eager_formula.eager_formula(function, SimpleNamespace(), GIVEN) is None


def test_arguments_that_change_the_result_are_not_known():
    options = {**GIVEN, "head_mask": torch.ones(1)}
    assert eager_formula.eager_formula(reads_an_unknown_argument, SimpleNamespace(), GIVEN) is not None
    assert eager_formula.eager_formula(reads_an_unknown_argument, SimpleNamespace(), options) is None


def test_the_comparison_leaves_hooks_and_random_numbers_alone():
    def refuse(tensor):
        raise AssertionError

    eager_formula._compared.cache_clear()
    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), torch.no_grad():
        assert eager_formula.eager_formula(own_function("llama"), SimpleNamespace(), GIVEN) is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(torch_compat.flex_attention is None, reason="needs torch 2.9")
def test_which_kernel_a_formula_gets(monkeypatch):
    """As on CUDA in half precision, with each kernel's float32 stand-in; all give what the model's function gives."""
    monkeypatch.setattr(eager, "_is_fast", lambda query: True)
    monkeypatch.setattr(eager, "flash_takes", lambda query, value: True)
    monkeypatch.setattr(torch_compat, "flash_attention", emulated_forward(False))
    monkeypatch.setattr(flex_kernel, "_compiled", lambda *kind: not_compiled)
    monkeypatch.setattr(flex_kernel, "_why_not_compiled", lambda *key: None)  # it has no backward on the CPU
    inputs = [t.detach() for t in random_tensors(20, dtype=torch.float32)]
    sinks, memo = torch.randn(HEADS), {}
    for family, own in {"llama": {}, "gpt_oss": {}, "gemma2": {"softcap": 2.0}}.items():
        module = SimpleNamespace(num_key_value_groups=2, training=True, sinks=sinks)
        options = {**arguments(*SHARED, 20), "scaling": 0.3, "dropout": 0.0, **own}
        layer = eager.EagerLayer(own_function(family), module, options, 3, None, memo)
        expected = eager._sequence_by_sequence(layer, *inputs)
        assert relative_error(eager.eager_attention(layer, *inputs), expected) < 1e-5
    assert list(memo) == [("flex", 3)]
