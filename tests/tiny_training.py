"""Tiny trainers and micro-batches for the tests of the trainer."""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.harness.models import save_checkpoint
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, tokenizer


def reward_length(completion_ids, **kwargs):
    return [float(len(ids)) + ids[0] % 7 for ids in completion_ids]


def make_trainer(folder, cls=FusedGRPOTrainer, kind="llama", model=None, config=None, peft_config=None, **options):
    """A trainer of class `cls` on a tiny model; `options` go to its arguments."""
    if config is None:
        config = FusedGRPOConfig if cls is not GRPOTrainer else GRPOConfig
    args = config(
        output_dir=str(folder / "out"),
        **{
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "bf16": False,
            "gradient_checkpointing": False,
            "seed": 3,
            **options,
        },
    )
    return cls(
        model=str(save_checkpoint(kind, folder, torch.float32)) if model is None else model,
        reward_funcs=reward_length,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}),
        eval_dataset=Dataset.from_dict({"prompt": ["w9 w8 w5", "w7"] * 2}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def make_inputs(rows=4, length=8, seed=0, **extra):
    """One micro-batch as `_prepare_inputs` returns it, with padding on both sides."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (rows,), generator=generator)
    completion_mask = (torch.arange(length) < lengths[:, None]).long()
    prompt_mask = torch.ones(rows, 3, dtype=torch.long)
    prompt_mask[0, :2] = 0
    return {
        "prompt_ids": torch.randint(3, VOCAB_SIZE, (rows, 3), generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
        **extra,
    }


def loss_and_gradients(trainer, inputs):
    """Loss of one micro-batch and every parameter's gradient by name."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    loss = trainer.compute_loss(trainer.model, copies)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def dense_log_probs(model, inputs):
    """Log-probabilities `[B, T]` of a micro-batch's completions, and of all tokens in their place `[B, T, V]`."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    before = inputs["prompt_ids"].shape[1] - 1  # each token is predicted by the one before it
    log_p = model(input_ids=ids, attention_mask=mask).logits[:, before:-1].log_softmax(-1)
    return log_p.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1), log_p
