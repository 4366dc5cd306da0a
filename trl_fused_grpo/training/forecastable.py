"""
Whether every batch of a training can have a forecast of its gradients, and what follows from one.

A forecast exists where the gradient of a token follows from the log-probs of its sequence. Each function returns the
reason why not, as in `eligibility.py`, and after a colon what to change.
"""

from typing import Any

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat

from .eligibility import replaced_objective, why_weights_move
from .loss_request import objective_of, padding_counts


def why_no_forecast(trainer: Any) -> str | None:
    """
    Why a batch of the training may have no forecast of its gradients, and what to change; `None` where each has one.
    """
    method = replaced_objective(trainer)
    if method is not None:
        return f"what {method} does to the gradient is not known: remove it"
    if objective_of(trainer).top_entropy_quantile < 1.0:
        return "the entropy quantile looks at the whole batch: set top_entropy_quantile=1.0"
    if padding_counts(trainer):
        return "this TRL's luspo counts padding: use TRL 1.10 or newer, or another loss_type"
    return None


def why_zero_grad_sequences_are_not_skipped(trainer: Any, layout: str) -> str | None:
    """Why `fused_skip_zero_grad_sequences` cannot leave a sequence out of the model, or `None`."""
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss counts every sequence"
    if trainers.beta_of_loss(trainer) != 0.0:
        return f"with beta={trainer.beta} every sequence receives a gradient from the KL term"
    if trl_compat.has_entropy_bonus(trainer):
        return "every sequence receives a gradient from the entropy bonus"
    reason = why_no_forecast(trainer)
    if reason is not None:
        return f"it needs to know which sequences receive a gradient, and {reason}"
    if trainers.loss_type(trainer) == "vespo" and has_old_logps(trainer):
        return "vespo logs a weight of every sequence"
    if layout != "packed":
        return f"the layout of the rows is {layout!r}, not 'packed': only the head leaves them out"
    return None


def has_old_logps(trainer: Any) -> bool:
    """Whether batches have old log-probs, of generation or of the training forward."""
    if trainers.is_rloo(trainer) or trainers.corrects_sampling(trainer):
        return True
    return why_weights_move(trainer) is not None
