"""Bad input is refused before anything is computed, with the tensor and what to change named."""

from typing import Any

from torch import Tensor


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
