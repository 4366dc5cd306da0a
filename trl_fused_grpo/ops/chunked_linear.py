"""The GEMMs (matrix multiplications) of the head over chunks of rows: logits in forward, gradients in backward."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import kernels
from .kernels import LogitTransform


class ChunkedLinear:
    """Rows of hidden states, the head that makes logits of them, and one buffer of logits that all chunks share."""

    def __init__(
        self,
        hidden: Tensor,  # [N, H + r]
        weight: Tensor,  # [V, H], multiplies the first `H` columns of `hidden`
        bias: Tensor | None,  # [V]
        lora_b: Tensor | None,  # [V, r], multiplies the last `r` columns of `hidden`
        targets: Tensor,  # [N], int64
        transform: LogitTransform,
        compute_dtype: torch.dtype,  # of the GEMMs' inputs and of the logits
        chunk_rows: int,  # rows of logits in memory at a time
    ):
        self.hidden, self.weight, self.bias, self.lora_b = hidden, weight, bias, lora_b
        self.targets, self.transform = targets, transform
        self.compute_dtype, self.chunk_rows = compute_dtype, chunk_rows
        self.kernels = kernels.for_device(hidden.device)
        self._cast_weight: Tensor | None = None
        self._buffer: Tensor | None = None

    @property
    def cast_weight(self) -> Tensor:
        """`[weight, lora_b]` in the compute dtype `[V, H + r]`; cast at the first use, then kept until [`release`]."""
        if self._cast_weight is None:
            self._cast_weight, _ = self.cast_head(slice(None))
        return self._cast_weight

    def cast_head(self, vocab: slice) -> tuple[Tensor, Tensor | None]:
        """`[weight, lora_b]` `[v, H + r]` and bias `[v]` of a slice of the vocabulary, in the compute dtype."""
        parts = [part[vocab].to(self.compute_dtype) for part in (self.weight, self.lora_b) if part is not None]
        bias = None if self.bias is None else self.bias[vocab].to(self.compute_dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), bias

    def empty_per_row(self) -> Tensor:
        """An uninitialised number for each row `[N]`, in float32 at least."""
        return self.hidden.new_empty(len(self.targets), dtype=torch.promote_types(self.compute_dtype, torch.float32))

    def hidden_rows(self, rows: slice | Tensor) -> Tensor:
        """Hidden states of `rows` in the compute dtype `[n, H + r]`."""
        hidden = self.hidden[rows] if isinstance(rows, slice) else self.hidden.index_select(0, rows)
        return hidden.to(self.compute_dtype)

    def compute_logits(self, rows: slice | Tensor) -> Tensor:
        """Raw logits of `rows` `[n, V]`, in the shared buffer, which the next call overwrites."""
        hidden = self.hidden_rows(rows)  # [n, H + r]
        if self._buffer is None or len(self._buffer) < len(hidden):
            self._buffer = None  # freed before its successor is allocated
            self._buffer = hidden.new_empty(len(hidden), self.weight.shape[0])
        logits = self._buffer[: len(hidden)]
        matmul(hidden, self.cast_weight.t(), out=logits)  # [n, H + r] @ [H + r, V]
        if self.bias is not None:
            logits += self.bias.to(self.compute_dtype)
        return logits

    def release(self) -> None:
        """Free the buffer and the cast weight."""
        self._buffer = self._cast_weight = None


class GradAccumulator:
    """Gradients of hidden states, weight, bias and `lora_b`, summed over chunks. `needs` says which."""

    def __init__(self, linear: ChunkedLinear, needs: Sequence[bool]):
        self.linear, self._needs = linear, needs
        acc_dtype = torch.promote_types(linear.compute_dtype, torch.float32)
        # One GEMM gives a row's whole gradient, so nothing is summed in it; only float16 lacks the range to hold it
        row_dtype = acc_dtype if linear.compute_dtype == torch.float16 else linear.compute_dtype
        row_dtype = torch.promote_types(row_dtype, linear.hidden.dtype)  # never coarser than what `finish` returns
        self.hidden = torch.zeros_like(linear.hidden, dtype=row_dtype) if needs[0] else None  # [N, H + r]
        self.weight = torch.empty_like(linear.weight, dtype=acc_dtype) if needs[1] else None  # [V, H]
        self.bias = torch.zeros_like(linear.bias, dtype=acc_dtype) if linear.bias is not None and needs[2] else None
        self.lora_b = (
            torch.zeros_like(linear.lora_b, dtype=acc_dtype) if linear.lora_b is not None and needs[3] else None
        )  # [V, r]
        self._head_is_empty = True  # the weight's buffer is then not written yet, and the others are zero
        self._pending_factor: float | Tensor | None = None
        self._first_row = 0  # of `hidden`

    def add(
        self,
        rows: slice | Tensor,  # [n] as a tensor
        logits: Tensor,  # [n, V], raw
        lse: Tensor,  # [n]
        entropies: Tensor | None,  # [n], needed with `grad_entropies` only
        grad_logps: Tensor,  # [n]
        grad_entropies: Tensor | None,  # [n]
    ) -> None:
        """Overwrite the logits of `rows` with their gradient and add what follows from it to the gradients."""
        linear = self.linear
        self._apply_pending_factor()
        linear.kernels.logits_grad_(
            logits, linear.targets[rows], lse, entropies, grad_logps, grad_entropies, linear.transform
        )  # [n, V]
        self._add_to_hidden(rows, logits)
        self._add_to_head(rows, logits)

    def _add_to_hidden(self, rows: slice | Tensor, grad_logits: Tensor) -> None:
        if self.hidden is None:
            return
        # [n, V] @ [V, H + r]
        if isinstance(rows, slice):
            own = self.hidden[rows.start - self._first_row : rows.stop - self._first_row]
            matmul(grad_logits, self.linear.cast_weight, out=own)
        else:
            grad = self.hidden.new_empty(len(rows), self.hidden.shape[1])
            matmul(grad_logits, self.linear.cast_weight, out=grad)
            self.hidden.index_add_(0, rows, grad)

    def _add_to_head(self, rows: slice | Tensor, grad_logits: Tensor) -> None:
        linear, width = self.linear, self.linear.weight.shape[1]
        if self.weight is not None:
            # [V, n] @ [n, H]; the first matmul overwrites, so that the buffer needs no zeros
            hidden = linear.hidden_rows(rows)[:, :width]
            (matmul if self._head_is_empty else add_matmul)(grad_logits.t(), hidden, out=self.weight)
        if self.lora_b is not None:
            add_matmul(grad_logits.t(), linear.hidden_rows(rows)[:, width:], out=self.lora_b)  # [V, n] @ [n, r]
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)
        self._head_is_empty = False

    def of_group(self, rows: slice) -> "GradAccumulator":
        """
        An accumulator for a group of `rows` whose gradients will be multiplied by one factor, see [`add_group`]. While
        this one has no gradient of the head, the other one takes its memory.
        """
        is_first = self._head_is_empty
        group = GradAccumulator(self.linear, (False, *(needed and not is_first for needed in self._needs[1:])))
        if is_first:
            group.weight, group.bias, group.lora_b = self.weight, self.bias, self.lora_b
        if self.hidden is not None:
            acc_dtype = torch.promote_types(self.hidden.dtype, torch.float32)
            group.hidden = self.hidden[rows].to(acc_dtype)  # a view, or a buffer whose numbers are rounded once
        group._first_row = rows.start
        return group

    def add_group(self, group: "GradAccumulator", rows: slice, factor: Tensor) -> None:
        """Add the gradients of a group of `rows`, multiplied by `factor`, a scalar tensor."""
        if self.hidden is not None and group.hidden is not None:
            torch.mul(group.hidden, factor, out=self.hidden[rows])
        for grad, of_group in ((self.weight, group.weight), (self.bias, group.bias), (self.lora_b, group.lora_b)):
            if grad is not None and grad is of_group:
                grad.mul_(factor)
            elif grad is not None and of_group is not None:
                grad.addcmul_(of_group, factor)
        self._head_is_empty = False

    def scale(self, factor: float | Tensor) -> None:
        """
        Multiply all gradients by `factor`, in [`finish`] together with the cast, or before the next addition. Where the
        head needs none, each row may have its own: `[N, 1]`.
        """
        self._pending_factor = factor

    def _apply_pending_factor(self) -> None:
        if self._pending_factor is not None:
            for grad in (self.hidden, self.weight, self.bias, self.lora_b):
                if grad is not None:
                    grad.mul_(self._pending_factor)
            self._pending_factor = None

    def reset(self) -> None:
        """Set all gradients to zero."""
        self._pending_factor, self._head_is_empty = None, True
        for grad in (self.hidden, self.bias, self.lora_b):
            if grad is not None:
                grad.zero_()

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight, bias and `lora_b`, each cast once, to the dtype of its tensor."""
        if self.weight is not None and self._head_is_empty:
            self.weight.zero_()
        linear = self.linear
        pairs = (  # (gradient, its tensor)
            (self.hidden, linear.hidden),
            (self.weight, linear.weight),
            (self.bias, linear.bias),
            (self.lora_b, linear.lora_b),
        )
        return tuple(
            None if grad is None or tensor is None else self._finish(grad, tensor.dtype) for grad, tensor in pairs
        )

    def _finish(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        if self._pending_factor is None:
            return grad.to(dtype)
        out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
        return torch.mul(grad, self._pending_factor, out=out)


def split_range(first: int, last: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `first` up to `last`."""
    return (slice(start, min(start + size, last)) for start in range(first, last, size))


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b`, accumulated in float32 and rounded once to the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out += a @ b` for a float32 `out`: rounding each chunk's `a @ b` to bfloat16 first would bias training."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
