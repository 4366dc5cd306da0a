"""Bad input is refused before anything is computed, with the tensor and what to change named."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from .aux_loss import why_no_aux_loss
from .question import objective_of


def check_way(trainer: GRPOTrainer, way: str) -> None:
    """
    Raise when a forecast is forced where none exists.

    Raises:
        `ValueError`: naming the options to change.
    """
    if way == "forecast" and not objective_of(trainer).is_tokenwise(False):
        raise ValueError(
            "fused_way='forecast' needs an objective whose gradient follows from each token alone: set "
            "fused_way='auto', or off_policy_mask_threshold=None and top_entropy_quantile=1.0."
        )


def check_aux_loss(trainer: Any, causal_lm: PreTrainedModel) -> None:
    """
    Raise when an auxiliary loss is asked of a model that has none.

    Raises:
        `ValueError`: with the reason and the option to change.
    """
    if not getattr(trainer, "aux_loss_enabled", False):
        return
    reason = why_no_aux_loss(causal_lm)
    if reason is not None:
        raise ValueError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} asks for the auxiliary loss of "
            f"{type(causal_lm).__name__}, but {reason}: set router_aux_loss_coef=0.0."
        )


def check_shapes(inputs: dict[str, Any]) -> None:
    """
    Raise when a tensor does not fit the completions.

    Raises:
        `ValueError`: naming the tensor, its shape and the shape that was expected.
    """
    batch, _ = shape = inputs["completion_ids"].shape
    expected = {
        "completion_mask": [shape],
        "tool_mask": [shape],
        "advantages": [(batch,), (batch, 1), shape],
        "old_per_token_logps": [shape],
        "ref_per_token_logps": [shape],
        "importance_sampling_ratio": [shape, (batch, 1)],
    }
    for name, shapes in expected.items():
        value = inputs.get(name)
        if value is not None and tuple(value.shape) not in [tuple(s) for s in shapes]:
            wanted = " or ".join(str(list(s)) for s in shapes)
            raise ValueError(
                f"{name} has shape {list(value.shape)}, but completion_ids {list(shape)} ask for {wanted}."
            )


def vocab_size_of(head: Any, causal_lm: Any) -> int:
    """Tokens that an output projection knows, also between forwards, when its weight may be a shard or empty."""
    shape = getattr(head.weight, "ds_shape", head.weight.shape)  # ZeRO-3 keeps the whole shape beside an empty weight
    if len(shape) == 2:
        return shape[0]
    features = head.in_features, head.out_features  # FSDP1 keeps a flat shard
    # PEFT's copy of a head that is tied to the embeddings names its features the wrong way round
    is_turned = features[1] == causal_lm.config.get_text_config().hidden_size
    return features[0] if is_turned else features[1]


def check_token_ids(token_ids: Tensor, mask: Tensor, vocab_size: int) -> None:
    """
    Raise when a token that counts lies outside the vocabulary.

    Raises:
        `ValueError`: naming the first such token.
    """
    outside = ((token_ids < 0) | (token_ids >= vocab_size)) & mask.bool()
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"completion_ids[{row}, {column}] is {int(token_ids[row, column])}, outside the model's vocabulary of "
            f"{vocab_size} tokens: use the tokenizer the model was made for, or resize its embeddings."
        )
