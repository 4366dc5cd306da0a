"""Two trainers on equal models, fused and stock, and the micro-batches that show how layouts differ."""

import copy

import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from trl_fused_grpo.parity.tiny import VOCAB_SIZE

from .oracle import relative_error
from .tiny_training import loss_and_gradients, make_inputs, make_trainer


SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def from_config(config, attention="sdpa"):
    """A function that makes the same model every time."""

    def make():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)

    return make


def make_pair(tmp_path, make_model, shared=None, peft_config=None, **options):
    """A fused trainer with further `options` and a stock one, each on its own model; both have the `shared` options."""
    shared = shared or {}
    make_adapter = peft_config or (lambda: None)
    fused = make_trainer(tmp_path, model=make_model(), peft_config=make_adapter(), **shared, **options)
    stock = make_trainer(tmp_path, GRPOTrainer, model=make_model(), peft_config=make_adapter(), **shared)
    with torch.no_grad():  # adapters start from random numbers
        for mine, other in zip(fused.model.parameters(), stock.model.parameters(), strict=True):
            mine.copy_(other)
    return fused, stock


def short_rows(longest=8, **extra):
    """Rows of up to `longest` of 8 completion tokens, prompts of 1 to 3, two of them with several completions."""
    inputs = make_inputs(rows=9, **extra)
    inputs["completion_mask"] = (torch.arange(8) < (torch.arange(9) % (longest + 1))[:, None]).long()
    lengths = torch.arange(9) % 3 + 1
    inputs["prompt_mask"] = (torch.arange(3) >= 3 - lengths[:, None]).long()
    prompt = torch.tensor([0, 1, 0, 1, 1, 2, 2, 2, 0])
    for name in ("prompt_ids", "prompt_mask"):
        inputs[name] = inputs[name][prompt]
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def seeded(trainer, inputs, seed=0):
    """Loss and gradients with the random numbers that follow a seed, and a number drawn afterwards."""
    torch.manual_seed(seed)
    loss, gradients = loss_and_gradients(trainer, inputs)
    return loss, gradients, torch.rand(())


def assert_trains_as_stock(fused, stock, inputs, tolerance=1e-5):
    loss, gradients, drawn = seeded(fused, inputs)
    expected_loss, expected, expected_drawn = seeded(stock, inputs)
    assert relative_error(loss, expected_loss) < tolerance
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in gradients.items():
        # A gradient that is zero but for rounding has no direction
        assert (gradient - expected[name]).norm() < tolerance * max(expected[name].norm(), 1e-3 * largest), name
    return drawn, expected_drawn


def log_probs(trainer, inputs, batch_size=None, grad=False):
    """Log-probs `[B, T]` from TRL's log-prob method, as old log-probs are computed."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    trainer.model.train()
    with torch.set_grad_enabled(grad):
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 8, batch_size=batch_size)
    return logps.detach()[inputs["completion_mask"].bool()]
