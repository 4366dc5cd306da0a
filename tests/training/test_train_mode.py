"""`model.train()` of every micro-batch is left out where it changes nothing, and only there."""

from unittest import mock

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trl_fused_grpo.training.train_mode import train_mode_kept


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return LlamaForCausalLM(config).train()


def modules_set_by(model, change=lambda model: None):
    """How many modules are given a mode by the `train()` of a training step, after a change of the model."""
    change(model)
    calls = []
    set_attribute = nn.Module.__setattr__

    def counted(module, name, value):
        calls.append(name)
        set_attribute(module, name, value)

    with train_mode_kept(model), mock.patch.object(nn.Module, "__setattr__", counted):
        assert model.train() is model
    assert "train" not in vars(model)
    assert all(module.training for module in model.modules())
    return calls.count("training")


def test_nothing_is_set_where_all_modules_train(model):
    assert modules_set_by(model) == 0


@pytest.mark.parametrize("name", ["", "model.layers.0.mlp", "lm_head"])
def test_a_module_that_evaluates_trains_again(model, name):
    assert modules_set_by(model, lambda model: model.get_submodule(name).eval()) > 0


def test_a_module_with_a_train_of_its_own_has_it_called(model):
    class Own(nn.Linear):
        calls = 0

        def train(self, mode=True):
            Own.calls += 1
            return super().train(mode)

    def change(model):
        model.lm_head = Own(8, 16, bias=False)

    assert modules_set_by(model, change) > 0
    assert Own.calls == 1


def test_a_train_of_an_instance_is_called(model):
    seen = []
    own = mock.Mock(side_effect=lambda mode=True: seen.append(mode))
    model.lm_head.train = own
    with train_mode_kept(model):
        model.train()
    assert seen == [True]
    model.train = own
    with train_mode_kept(model):
        assert model.train is own
        model.train()
    assert model.train is own
    assert len(seen) == 2


def test_evaluation_is_never_left_out(model):
    with train_mode_kept(model):
        model.eval()
    assert not any(module.training for module in model.modules())


def test_the_second_call_and_a_failure_find_torchs_method(model):
    with train_mode_kept(model):
        model.train()
        model.lm_head.eval()
        model.train()
        assert model.lm_head.training
    with pytest.raises(RuntimeError), train_mode_kept(model):
        raise RuntimeError("the step fails")
    assert "train" not in vars(model)
