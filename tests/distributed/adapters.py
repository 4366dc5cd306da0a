"""Adapters, on the output projection among others."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from trl_fused_grpo._compat.models import is_peft_model
from trl_fused_grpo._compat.trl import REFUSES_ADAPTER_ON_HEAD, logps_result


@dataclass(frozen=True)
class Head:
    """
    What is done to the output projection, and around it.

    Attributes:
        saved (`bool`):
            `modules_to_save=["lm_head"]` rather than LoRA on it.
        tied (`bool`):
            Whether the model's embeddings are tied to it.
        refers (`bool`):
            Whether the loss has a KL term towards the model with its adapters disabled.
        keeps_activations (`bool`):
            Whether gradient checkpointing is off.
        together (`bool`):
            Whether the embedding that is tied to it gets the same adapter (`ensure_weight_tying=True`).
        flat (`bool`):
            Whether FSDP1 trains flat parameters (`use_orig_params=False`).
    """

    saved: bool = False
    tied: bool = False
    refers: bool = False
    keeps_activations: bool = False
    together: bool = False
    flat: bool = False


HEADS = {
    "lora-head": Head(refers=True),
    "lora-head-tied": Head(tied=True, keeps_activations=True),
    "lora-head-flat": Head(flat=True, keeps_activations=True),
    "saved-head": Head(saved=True, keeps_activations=True),
    "saved-head-tied": Head(saved=True, tied=True),
    "saved-head-flat": Head(saved=True, flat=True, refers=True),
}
TOGETHER = {
    "lora-head-together": Head(tied=True, together=True),
    "saved-head-together": Head(saved=True, tied=True, together=True),
}


def adapter(case: str) -> Any:
    """The PEFT configuration of a case, or `None`."""
    head = HEADS.get(case) or TOGETHER.get(case)
    if case != "lora" and head is None:
        return None
    from peft import LoraConfig

    targets, saved = ["q_proj", "v_proj"], None
    if head:
        targets, saved = (targets, ["lm_head"]) if head.saved else ([*targets, "lm_head"], None)
    options = {"ensure_weight_tying": True} if head and head.together else {}
    # Neither factor starts at zero, so both get a gradient
    return LoraConfig(
        r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False, task_type="CAUSAL_LM", **options
    )


def oracle(case: str) -> str:
    """The trainer that others are compared with in one process: stock, or dense where stock refuses the adapter."""
    refused = case in HEADS and not HEADS[case].saved and REFUSES_ADAPTER_ON_HEAD
    return "dense" if refused else "stock"


def adapters_disabled(trainer: Any) -> AbstractContextManager:
    """While it lasts, the policy is the model that its adapters were put on; nothing without adapters."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.disable_adapter() if is_peft_model(model) else nullcontext()


def dense_log_probs(
    self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
):
    """In the place of TRL's method: log-probs and entropies `[B, T]` from logits `[B, T, V]`."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    log_probs = (logits / self.temperature).log_softmax(-1)
    logps = log_probs.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
    return logps_result(logps, -(log_probs.exp() * log_probs).sum(-1).detach(), None)
