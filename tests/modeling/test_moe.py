"""The auxiliary loss of Mixture-of-Experts families: stock's, or refused with what to change."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.head.moe import load_balancing_loss
from trl_fused_grpo.parity.tiny import model_config


EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
LLAMA4 = {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 1}
LFM2 = {"num_experts": 4, "moe_intermediate_size": 32, "num_dense_layers": 0}
LFM2 |= {"layer_types": ["full_attention"] * 2}

needs_aux_loss = pytest.mark.skipif(not trl_compat.RETURNS_AUX_LOSS, reason="this TRL has no auxiliary loss")


def model_of(config, options):
    """A tiny model of a family whose own forward computes no auxiliary loss."""
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    shape = {name: value for name, value in model_config("llama").to_diff_dict().items() if name != "model_type"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**shape, **EXPERTS, **options}))


def llama4():
    return model_of("Llama4TextConfig", LLAMA4)


@needs_aux_loss
def test_a_family_without_one_is_refused_in_the_constructor(tmp_path):
    with pytest.raises(ValueError, match=r"auxiliary loss of Llama4ForCausalLM.*set router_aux_loss_coef=0\.0"):
        make_trainer(tmp_path, model=llama4(), router_aux_loss_coef=0.5)


def test_without_the_auxiliary_loss_it_trains_what_its_own_logits_train(tmp_path):
    off = {"router_aux_loss_coef": 0.0} if trl_compat.RETURNS_AUX_LOSS else {}
    trainer = make_trainer(tmp_path, model=llama4(), **off)
    inputs = make_inputs()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 8)
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -9:-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, -8:].unsqueeze(-1)).squeeze(-1)
    counts = inputs["completion_mask"].bool()
    assert relative_error(logps[counts], expected[counts]) < 1e-5
    assert loss_and_gradients(trainer, inputs)[1]["lm_head.weight"].abs().sum() > 0


@needs_aux_loss
def test_a_family_whose_forward_computes_none_is_stocks_or_refused(tmp_path):
    def make(cls=None):
        classes = {} if cls is None else {"cls": cls}
        return make_trainer(tmp_path, model=model_of("Lfm2MoeConfig", LFM2), router_aux_loss_coef=0.5, **classes)

    if trl_compat.LOGPS_FROM_LOGITS:  # stock fails on it in training
        with pytest.raises(ValueError, match="no load-balancing loss of its own"):
            make()
        return
    fused = make()
    loss, gradients = loss_and_gradients(fused, make_inputs())
    expected_loss, expected = loss_and_gradients(make(GRPOTrainer), make_inputs())
    assert fused._metrics["train"]["aux_loss"][0] > 0
    assert relative_error(loss, expected_loss) < 1e-5
    assert all(relative_error(gradients[name], gradient) < 1e-5 for name, gradient in expected.items())


def test_a_backbone_without_router_logits_is_named():
    with pytest.raises(ValueError, match="the backbone of Llama4ForCausalLM returns no router logits"):
        load_balancing_loss(llama4(), object(), None)
