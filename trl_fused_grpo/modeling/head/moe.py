"""The load-balancing loss of a Mixture-of-Experts model, through the function that stock calls."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import trl as trl_compat


def why_no_aux_loss(causal_lm: PreTrainedModel) -> str | None:
    """Why there is no auxiliary loss to compute for a model, or `None`. Many families return router logits alone."""
    if _function(causal_lm) is None:
        return "its family has no load-balancing loss of its own"
    if _number(causal_lm, "num_experts") is None or _number(causal_lm, "num_experts_per_tok") is None:
        return "neither it nor its config names num_experts and num_experts_per_tok"
    return None


def load_balancing_loss(causal_lm: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """The auxiliary loss, a scalar."""
    logits = getattr(outputs, "router_logits", None)
    if logits is None:
        raise ValueError(
            f"the backbone of {type(causal_lm).__name__} returns no router logits, so there is no auxiliary loss: set "
            "router_aux_loss_coef=0.0."
        )
    experts, per_token = _number(causal_lm, "num_experts"), _number(causal_lm, "num_experts_per_tok")
    function = _function(causal_lm)
    assert function is not None, "see why_no_aux_loss"
    return function(logits, experts, per_token, attention_mask)


def _function(causal_lm: PreTrainedModel) -> Callable | None:
    if not trl_compat.LOGPS_FROM_LOGITS:  # the auxiliary loss is Mixtral's
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        return load_balancing_loss_func
    modeling = sys.modules[next(c for c in type(causal_lm).__mro__ if "modeling_" in c.__module__).__module__]
    function = getattr(modeling, "load_balancing_loss_func", None)
    if function is None or list(inspect.signature(function).parameters)[2] != "top_k":  # Doge's takes more
        return None
    return function


def _number(causal_lm: PreTrainedModel, name: str) -> int | None:
    return getattr(causal_lm, name, None) or getattr(causal_lm.config.get_text_config(), name, None)
