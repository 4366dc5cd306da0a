"""
A KL estimator other than TRL's `"k3"`. TRL computes its loss with `beta=0.0`, and [`kl_term`] is added to it. A token's
KL has the weight that TRL gives it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.objective import GRPOObjective, token_terms
from trl_fused_grpo.loss.reduction import token_weights

from .findings import replaced_objective
from .requests import batch_of, objective_of, padding_counts


def replaces_kl(trainer: GRPOTrainer, name: str) -> bool:
    """Return `True` if the KL term with the estimator `name` is computed here instead of by TRL."""
    if trainers.beta_of_loss(trainer) == 0.0 or name == "k3":
        return False
    method = replaced_objective(trainer)
    if method is not None:
        raise ValueError(f"kl_estimator={name!r} does not reach {method}: set kl_estimator='k3'.")
    return True


def estimator_in_force(objective: GRPOObjective) -> str:
    """The estimator that is computed, by the name under which it is logged: `k1` times the importance ratio is `k4`."""
    name = objective.kl_estimator
    if name in ("k1", "k4"):
        return "k4" if objective.weighs_kl else "k1"
    return f"{name}_bias_corrected" if objective.weighs_kl else name


def kl_term(trainer: GRPOTrainer, inputs: dict[str, Any], logps: Tensor, name: str) -> Tensor:
    """
    `beta` times the KL divergence of a micro-batch by the estimator `name`, aggregated as TRL aggregates its loss; a
    scalar. Logs the mean over tokens, in nats, under the estimator's name.
    """
    objective = objective_of(trainer, kl_estimator=name)
    if padding_counts(trainer):
        objective = replace(objective, reduction="padded_sequence_sum")
    is_training = trainer.model is not None and trainer.model.training
    batch = batch_of(trainer, inputs, objective, trainer.current_gradient_accumulation_steps if is_training else 1.0)
    # Only the KL term is used: what masks the policy term does not matter
    kl = token_terms(replace(objective, off_policy_mask_threshold=None, top_entropy_quantile=1.0), batch, logps).kl
    assert kl is not None, "beta is not zero"
    sums = torch.stack([(kl.detach() * batch.mask).sum(), batch.mask.sum()])
    total, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    metrics = trl_compat.metrics_of(trainer, "train" if is_training else "eval")
    metrics[f"kl/{estimator_in_force(objective)}"].append(total / max(count, 1.0))
    return objective.beta * (kl * token_weights(objective, batch)).sum()
