"""
Gradients of rows whose logits are computed a second time, with the vocabulary in the outer loop: the gradient of a tile
of the head is whole when the loop leaves it, so that no `[V, H]` buffer in float32 exists.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .chunked_linear import ChunkedLinear, add_matmul, matmul, slices


# Narrower tiles read the hidden states' gradient too often, wider ones bring a large buffer back
_LEAST_COLUMNS, _MOST_COLUMNS = 4096, 16384


def recomputed_gradients(
    linear: ChunkedLinear,
    rows: Tensor,
    lse: Tensor,
    entropies: Tensor | None,
    grad_logps: Tensor,
    grad_entropies: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """
    Gradients of hidden states, weight, bias and `lora_b` in their dtypes; `None` where not needed.

    Args:
        linear (`ChunkedLinear`): rows and head.
        rows (`Tensor`): indices `[M]` of the rows that receive a gradient, in rising order.
        lse (`Tensor`): `[N]`, log-sum-exp of each row's logits.
        entropies (`Tensor`, *optional*): `[N]`, needed with `grad_entropies`.
        grad_logps, grad_entropies (`Tensor`): `[N]`, the second optional.
        needs (`Sequence[bool]`): whether hidden, weight, bias and `lora_b` need a gradient, in this order.
    """
    acc_dtype = torch.promote_types(linear.compute_dtype, torch.float32)
    every_row = len(rows) == len(linear.targets)

    def pick(values: Tensor | None) -> Tensor | None:
        return values if values is None or every_row else values.index_select(0, rows)

    hidden = linear.rows_of_hidden(slice(None) if every_row else rows)  # [M, H + r]
    per_row = [pick(t) for t in (linear.targets, lse, entropies, grad_logps, grad_entropies)]  # [M]
    grad_hidden = torch.empty_like(hidden, dtype=acc_dtype) if needs[0] else None  # [M, H + r]
    owners = zip((linear.weight, linear.bias, linear.lora_b), needs[1:4], strict=True)
    like = torch.empty_like if len(rows) else torch.zeros_like  # every tile is written, where there are rows
    grads = [like(owner) if owner is not None and needed else None for owner, needed in owners]
    grad_weight, grad_bias, grad_lora_b = grads  # [V, H], [V], [V, r]

    vocab_size, width = linear.weight.shape
    # What multiplies the rows' gradient in that of weight and `lora_b`: the columns of whichever is trained
    inputs = hidden[:, 0 if needs[1] else width : None if needs[3] else width]
    height, columns = _tile(len(rows), vocab_size, linear.chunk_rows)
    buffer = hidden.new_empty(height * columns)
    for tile in slices(0, vocab_size, columns) if len(rows) else ():
        weight, bias = linear.operands(tile)  # [v, H + r], [v]
        grad_tile = weight.new_empty(len(weight), inputs.shape[1], dtype=acc_dtype)
        grad_bias_tile = None if grad_bias is None else weight.new_zeros(len(weight), dtype=acc_dtype)
        for piece in slices(0, len(rows), height):
            shape = piece.stop - piece.start, len(weight)
            logits = buffer[: math.prod(shape)].view(shape)
            matmul(hidden[piece], weight.t(), out=logits)  # [n, H + r] @ [H + r, v]
            if bias is not None:
                logits += bias
            row_grads = (None if t is None else t[piece] for t in per_row)
            linear.kernels.logits_grad_(logits, *row_grads, linear.transform, vocab_start=tile.start)
            # The first product of a sum needs no zeros to add to
            if grad_hidden is not None:
                (add_matmul if tile.start else matmul)(logits, weight, out=grad_hidden[piece])  # [n, v] @ [v, H + r]
            if inputs.shape[1]:
                (add_matmul if piece.start else matmul)(logits.t(), inputs[piece], out=grad_tile)  # [v, n] @ [n, .]
            if grad_bias_tile is not None:
                grad_bias_tile += logits.sum(0, dtype=acc_dtype)
        if grad_weight is not None:
            grad_weight[tile] = grad_tile[:, :width]
        if grad_lora_b is not None:
            grad_lora_b[tile] = grad_tile[:, -grad_lora_b.shape[1] :]
        if grad_bias is not None and grad_bias_tile is not None:
            grad_bias[tile] = grad_bias_tile

    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(linear.hidden.dtype)
        if not every_row:
            grad_hidden = torch.zeros_like(linear.hidden).index_copy_(0, rows, grad_hidden)
    return grad_hidden, *grads


def _tile(rows: int, vocab_size: int, chunk_rows: int) -> tuple[int, int]:
    """Rows and columns of a tile that takes no more room than `chunk_rows` rows of logits."""
    room = chunk_rows * vocab_size
    most = min(max(room // max(rows, 1), _LEAST_COLUMNS), _MOST_COLUMNS, vocab_size)
    # Even in size, and 128 columns are one tile of the products
    columns = min(math.ceil(vocab_size / math.ceil(vocab_size / most) / 128) * 128, vocab_size)
    return min(rows, max(1, room // columns)), columns
