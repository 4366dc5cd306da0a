"""PEFT's copy of the embeddings that is tied to the head trains as in stock."""

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import model_config


peft = pytest.importorskip("peft")


def lora(**options):
    if not hasattr(peft.LoraConfig, "ensure_weight_tying"):
        options.pop("ensure_weight_tying", None)
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})


def tied_copy():
    """Options that train one copy of embeddings and head; PEFT before 0.18 cannot tie them."""
    if not hasattr(peft.LoraConfig, "ensure_weight_tying"):
        pytest.skip("this PEFT does not tie copies")
    return {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


def trainers(folder, **options):
    config = lora(**tied_copy())
    result = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model_config("tied"))
        trainer = make_trainer(folder, cls, model=model, peft_config=config, **options)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, trainer.model.parameters()):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        result.append(trainer)
    return result


def test_a_copy_tied_to_the_embeddings_has_stocks_loss_and_gradients(tmp_path):
    (loss, gradients), (our_loss, our_gradients) = (loss_and_gradients(t, make_inputs()) for t in trainers(tmp_path))
    assert relative_error(our_loss, loss) < 1e-5
    assert gradients.keys() == our_gradients.keys()
    assert any("embed_tokens.modules_to_save" in name or "lm_head.modules_to_save" in name for name in gradients)
    for name, gradient in gradients.items():
        assert relative_error(our_gradients[name], gradient) < 1e-5, name


def test_a_copy_tied_to_the_embeddings_trains_as_stocks_does(tmp_path):
    runs = []
    for trainer in trainers(tmp_path, max_steps=3, optim="sgd", learning_rate=0.05):
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        set_seed(1)
        trainer.train()
        after = dict(trainer.model.named_parameters())
        steps = {name: after[name].detach() - value for name, value in before.items()}
        logs = [
            {k: v for k, v in log.items() if "time" not in k and "/s" not in k} for log in trainer.state.log_history
        ]
        runs.append((steps, logs))
    (steps, logs), (our_steps, our_logs) = runs
    for name, step in steps.items():
        assert relative_error(our_steps[name], step) < 1e-4, name
    for log, our_log in zip(logs[:3], our_logs[:3], strict=True):
        assert {k: our_log[k] for k in log} == pytest.approx(log, rel=1e-4, abs=1e-6)
