"""Gradients under dropout: those of the loss that was computed, with what it dropped."""

import pytest
import torch

from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer


peft = pytest.importorskip("peft")


@pytest.mark.sample(3)
@pytest.mark.parametrize("checkpoints", [True, False], ids=["checkpointed", "everything-kept"])
@pytest.mark.parametrize(
    "options",
    [{}, {"fused_layout": "padded"}, {"fused_backward": "recompute"}, {"fused_compile": True}],
    ids=lambda options: "".join(options) or "default",
)
def test_gradients_of_adapters_with_dropout_are_the_slope_of_the_loss(tmp_path, options, checkpoints):
    assert_gradients_are_the_slope(tmp_path, checkpoints, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpoints", [True, False], ids=["checkpointed", "everything-kept"])
def test_gradients_of_compiled_adapters_are_the_slope_on_a_gpu(tmp_path, checkpoints):
    assert_gradients_are_the_slope(tmp_path, checkpoints, use_cpu=False)


def assert_gradients_are_the_slope(folder, checkpoints, **options):
    """In the steepest direction, where the same seed drops the same. Off-policy, as the loss on-policy is constant."""
    lora = {"target_modules": ["q_proj", "down_proj", "lm_head"], "lora_dropout": 0.3, "init_lora_weights": False}
    peft_config = peft.LoraConfig(task_type="CAUSAL_LM", **lora)
    trainer = make_trainer(folder, peft_config=peft_config, epsilon=1000.0, **options)
    device = trainer.accelerator.device
    trainer.model.double().train().to(device)
    if checkpoints:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {name: value.to(device) for name, value in make_inputs(4, 12).items()}
    inputs["old_per_token_logps"] = torch.full_like(inputs["completion_mask"], -7.0, dtype=torch.float64)
    weights = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}

    def at(distance, direction):
        torch.manual_seed(7)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.add_(direction[name], alpha=distance)
        return loss_and_gradients(trainer, inputs)

    _, gradients = at(0.0, weights)
    slope = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
    steepest = {name: gradient / slope for name, gradient in gradients.items()}
    (ahead, _), (behind, _) = at(1e-3, steepest), at(-2e-3, steepest)
    assert slope > 0.1
    torch.testing.assert_close((ahead - behind).to(slope) / 2e-3, slope, rtol=0.02, atol=0.0)
