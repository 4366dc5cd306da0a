"""One tiny model of each family: loss and every gradient are stock TRL's."""

import pytest
import torch
import transformers
from trl import GRPOTrainer

from trl_fused_grpo import FusedGRPOTrainer, LMHead
from trl_fused_grpo._trl_compat import SEAM_RETURNS_AUX_LOSS

from .oracle import relative_error
from .tiny_models import FAMILIES, seeing_inputs, seeing_model, tiny_model
from .tiny_training import loss_and_gradients, make_inputs, make_trainer


def assert_same(stock, ours):
    (loss, gradients), (our_loss, our_gradients) = stock, ours
    assert relative_error(our_loss, loss) < 1e-5
    assert gradients.keys() == our_gradients.keys()
    errors = {name: relative_error(our_gradients[name], gradient) for name, gradient in gradients.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda error: error[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_stocks(tmp_path, name):
    family = FAMILIES[name]
    stock = make_trainer(tmp_path, GRPOTrainer, model=tiny_model(family))
    ours = make_trainer(tmp_path, FusedGRPOTrainer, model=tiny_model(family))
    head = LMHead.of(ours.model)
    assert (head.logit_scale, head.softcap) == (family.scale, family.softcap)
    assert_same(*(loss_and_gradients(trainer, make_inputs()) for trainer in (stock, ours)))
    assert (ours.fused_stats.way, ours.fused_stats.recomputed) == ("forecast", 0)
    if SEAM_RETURNS_AUX_LOSS:
        assert ("aux_loss" in ours._metrics["train"]) == family.has_aux_loss


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3-vl"])
def test_models_that_see_are_stocks_too(tmp_path, name):
    trainers = [make_trainer(tmp_path, cls, model=seeing_model(name)) for cls in (GRPOTrainer, FusedGRPOTrainer)]
    stock, ours = (loss_and_gradients(trainer, seeing_inputs(name)) for trainer in trainers)
    assert any("vision" in parameter or "visual" in parameter for parameter in stock[1])
    assert_same(stock, ours)


@pytest.mark.parametrize(
    ("config", "option"), [("RecurrentGemmaConfig", "logits_soft_cap"), ("xLSTMConfig", "output_logit_soft_cap")]
)
def test_a_softcap_has_other_names_too(config, option):
    config = getattr(transformers, config)()
    head = type("Model", (), {"config": config, "get_output_embeddings": lambda self: torch.nn.Linear(2, 3)})()
    assert LMHead.of(head).softcap == getattr(config, option)
