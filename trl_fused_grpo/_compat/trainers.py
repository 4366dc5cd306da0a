"""
The trainers of TRL that have a fused subclass here, how they differ, and what is known of TRL's own subclasses of them.
"""

from typing import Any

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


# The trainers of TRL whose methods the fused trainers override, and the classes of their arguments
TRAINERS: tuple[type, ...] = (GRPOTrainer, RLOOTrainer)
CONFIGS: tuple[type, ...] = (GRPOConfig, RLOOConfig)

# The methods of a trainer that run between a generation and the moment when the weights move: with what they are given
# or with what is around them they may see a micro-batch, its loss or its gradients. `_run_epoch`: transformers >= 5.
# TRL's `_compute_loss` calls further ones (`trl.OBJECTIVE_METHODS`)
STEP_METHODS = (
    *("_inner_training_loop", "_run_epoch", "get_batch_samples", "training_step", "floating_point_ops"),
    *("compute_loss_context_manager", "autocast_smart_context_manager", "_prepare_inputs", "_prepare_input"),
    *("_generate_and_score_completions", "compute_loss", "compute_liger_loss", "_compute_loss"),
    "_get_per_token_logps_and_entropies",
)

# Objectives of `loss/objective.py` that a subclass in `trl.experimental` computes. GMPO: TRL >= 1.8, the same in each
_OBJECTIVES = {("trl.experimental.gmpo.gmpo_trainer", "GMPOTrainer._compute_loss"): "gmpo"}


def trl_class(cls: type) -> type:
    """The trainer of TRL, one of [`TRAINERS`], that a class is or inherits from."""
    return next(one for one in cls.__mro__ if one in TRAINERS)


def experimental_objective(method: Any) -> str | None:
    """
    The loss type that a `_compute_loss` computes if it is that of a trainer in `trl.experimental`; `None` if it is
    another, or one that [`loss/objective.py`] does not have.
    """
    names = getattr(method, "__globals__", {}).get("__name__"), getattr(method, "__qualname__", None)
    return _OBJECTIVES.get(names)


# RLOO: one ratio for each sequence, of which micro-batches keep the sum of the old log-probs. Its KL term is a part of
# the reward. It has one loss, the mean over the sequences of a micro-batch, and no correction of vLLM's sampling


def is_rloo(trainer: Any) -> bool:
    """Return `True` if a trainer is an `RLOOTrainer`."""
    return isinstance(trainer, RLOOTrainer)


def loss_type(trainer: Any) -> str:
    """The loss type that TRL's own `_compute_loss` computes; RLOO has no option for it."""
    return "rloo" if is_rloo(trainer) else trainer.loss_type


def beta_of_loss(trainer: Any) -> float:
    """Coefficient of the KL term in the loss."""
    return 0.0 if is_rloo(trainer) else trainer.beta


def corrects_sampling(trainer: Any) -> bool:
    """Return `True` if TRL multiplies the loss by vLLM's importance ratio."""
    return trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False)


def casts_head(trainer: Any) -> bool:
    """Return `True` if the output projection runs in float32; RLOO has no option for it."""
    return getattr(trainer.args, "cast_lm_head_to_fp32", False)
