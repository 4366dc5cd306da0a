"""
The backward mode `"recompute"`: gradients of rows whose logits are computed a second time, in tiles.

The outer loop runs over the vocabulary, the inner loop over the rows. The gradient of a slice of the head is therefore
complete when the inner loop ends, and no `[V, H]` buffer in float32 exists.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked_linear import ChunkedLinear, add_matmul, matmul, split_range


# Narrower tiles read and write the hidden states' gradient too often, wider ones bring a large buffer back
_MIN_COLUMNS, _MAX_COLUMNS = 4096, 16384


def recomputed_gradients(
    linear: ChunkedLinear,
    rows: Tensor,  # [M], indices of those that receive a gradient, in rising order
    lse: Tensor,  # [N], log-sum-exp of each row's logits
    entropies: Tensor | None,  # [N], needed with `grad_entropies` only
    grad_logps: Tensor,  # [N]
    grad_entropies: Tensor | None,  # [N]
    needs: Sequence[bool],  # for which of the four
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states, weight, bias and `lora_b` in their dtypes; `None` where not needed."""
    every_row = len(rows) == len(linear.targets)
    hidden = linear.hidden_rows(slice(None) if every_row else rows)  # [M, H + r]
    row_values = _RowValues(linear.targets, lse, entropies, grad_logps, grad_entropies)  # [N] each
    if not every_row:
        row_values = row_values.select(rows)  # [M] each
    # Nothing else refers to the float32 gradient of the hidden states, so the cast frees it
    grad_hidden, *head_grads = _TiledBackward(linear, hidden, row_values, needs).run()
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(linear.hidden.dtype)
        if not every_row:
            grad_hidden = torch.zeros_like(linear.hidden).index_copy_(0, rows, grad_hidden)
    return grad_hidden, *head_grads


class _RowValues(NamedTuple):
    """The numbers of each row that its logits' gradient follows from, in the order in which the kernel takes them."""

    targets: Tensor
    lse: Tensor
    entropies: Tensor | None
    grad_logps: Tensor
    grad_entropies: Tensor | None

    def select(self, rows: slice | Tensor) -> "_RowValues":
        values: list[Any] = [
            t if t is None else t[rows] if isinstance(rows, slice) else t.index_select(0, rows) for t in self
        ]
        return _RowValues(*values)


class _TiledBackward:
    """The two loops and the gradients that they fill."""

    def __init__(
        self,
        linear: ChunkedLinear,
        hidden: Tensor,  # [M, H + r], in the compute dtype
        row_values: _RowValues,  # [M] each
        needs: Sequence[bool],  # for which of hidden states, weight, bias and `lora_b`
    ):
        self.linear, self.hidden, self.row_values = linear, hidden, row_values
        self.acc_dtype = torch.promote_types(linear.compute_dtype, torch.float32)
        self.grad_hidden = torch.empty_like(hidden, dtype=self.acc_dtype) if needs[0] else None  # [M, H + r]
        like = torch.empty_like if len(hidden) else torch.zeros_like  # with rows, `run` writes every tile
        tensors = zip((linear.weight, linear.bias, linear.lora_b), needs[1:4], strict=True)
        grads = [like(tensor) if tensor is not None and needed else None for tensor, needed in tensors]
        self.grad_weight, self.grad_bias, self.grad_lora_b = grads  # [V, H], [V], [V, r]
        # The columns of `hidden` that the gradients of weight and `lora_b` are made from: of whichever is trained
        width = linear.weight.shape[1]
        self.inputs = hidden[:, 0 if needs[1] else width : None if needs[3] else width]  # [M, i]

    def run(self) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states (in float32 at least), weight, bias and `lora_b`."""
        if len(self.hidden):
            self._fill()
        return self.grad_hidden, self.grad_weight, self.grad_bias, self.grad_lora_b

    def _fill(self) -> None:
        vocab_size, width = self.linear.weight.shape
        count = len(self.hidden)
        tile_rows, tile_columns = _tile_shape(count, vocab_size, self.linear.chunk_rows)
        buffer = self.hidden.new_empty(tile_rows * tile_columns)  # the logits of one tile
        for vocab in split_range(0, vocab_size, tile_columns):
            weight, bias = self.linear.cast_head(vocab)  # [v, H + r], [v]
            grad = weight.new_empty(len(weight), self.inputs.shape[1], dtype=self.acc_dtype)  # [v, i]
            grad_bias = None if self.grad_bias is None else weight.new_zeros(len(weight), dtype=self.acc_dtype)  # [v]
            for rows in split_range(0, count, tile_rows):
                logits = self._grad_of_tile(rows, vocab, weight, bias, buffer)  # [n, v]
                self._add_tile(logits, rows, vocab, weight, grad, grad_bias)
            if self.grad_weight is not None:
                self.grad_weight[vocab] = grad[:, :width]
            if self.grad_lora_b is not None:
                self.grad_lora_b[vocab] = grad[:, -self.grad_lora_b.shape[1] :]
            if self.grad_bias is not None and grad_bias is not None:
                self.grad_bias[vocab] = grad_bias

    def _grad_of_tile(self, rows: slice, vocab: slice, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """Compute the logits of one tile and overwrite them with their gradient `[n, v]`."""
        shape = rows.stop - rows.start, len(weight)
        logits = buffer[: math.prod(shape)].view(shape)
        matmul(self.hidden[rows], weight.t(), out=logits)  # [n, H + r] @ [H + r, v]
        if bias is not None:
            logits += bias
        row_values = self.row_values.select(rows)
        self.linear.kernels.logits_grad_(logits, *row_values, self.linear.transform, vocab_start=vocab.start)
        return logits

    def _add_tile(
        self, grad_logits: Tensor, rows: slice, vocab: slice, weight: Tensor, grad: Tensor, grad_bias: Tensor | None
    ) -> None:
        """Add what follows from one tile to the gradients. The first matmul of a sum overwrites: no zeros needed."""
        if self.grad_hidden is not None:
            # [n, v] @ [v, H + r]
            (add_matmul if vocab.start else matmul)(grad_logits, weight, out=self.grad_hidden[rows])
        if self.inputs.shape[1]:
            # [v, n] @ [n, i]
            (add_matmul if rows.start else matmul)(grad_logits.t(), self.inputs[rows], out=grad)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0, dtype=self.acc_dtype)


def _tile_shape(rows: int, vocab_size: int, chunk_rows: int) -> tuple[int, int]:
    """Rows and columns of a tile that takes no more memory than `chunk_rows` rows of logits."""
    elements = chunk_rows * vocab_size
    most = min(max(elements // max(rows, 1), _MIN_COLUMNS), _MAX_COLUMNS, vocab_size)
    # Tiles of even size; and a multiple of 128 columns, which is one tile of a GEMM
    columns = min(math.ceil(vocab_size / math.ceil(vocab_size / most) / 128) * 128, vocab_size)
    return min(rows, max(1, elements // columns)), columns
