"""The head's GEMMs over chunks of rows: logits out, gradients back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import kernels
from .kernels import LogitTransform


class ChunkedLinear:
    """
    Rows of hidden states, the head they are projected through, and one buffer of logits for all chunks.

    Args:
        hidden (`Tensor`): shape `[N, H + r]`.
        weight (`Tensor`): shape `[V, H]`.
        bias (`Tensor`, *optional*): shape `[V]`.
        up (`Tensor`, *optional*): shape `[V, r]`, what the last `r` columns of `hidden` are projected through.
        targets (`Tensor`): shape `[N]`.
        transform (`LogitTransform`): scale, softcap and temperature of the logits.
        compute_dtype (`torch.dtype`): dtype of the GEMMs' inputs and of the logits.
        chunk_rows (`int`): rows of logits that exist at a time.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_b: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        compute_dtype: torch.dtype,
        chunk_rows: int,
    ):
        self.hidden, self.weight, self.bias, self.lora_b = hidden, weight, bias, lora_b
        self.targets, self.transform = targets, transform
        self.compute_dtype, self.chunk_rows = compute_dtype, chunk_rows
        self.kernels = kernels.for_device(hidden.device)
        self._cast_weight: Tensor | None = None
        self._buffer: Tensor | None = None

    @property
    def cast_weight(self) -> Tensor:
        """The weight in the compute dtype with `lora_b` beside it `[V, H + r]`; made at the first chunk that asks."""
        if self._cast_weight is None:
            self._cast_weight, _ = self.operands(slice(None))
        return self._cast_weight

    def operands(self, tokens: slice) -> tuple[Tensor, Tensor | None]:
        """Weight with `lora_b` beside it `[v, H + r]` and bias `[v]` of some columns, in the compute dtype."""
        parts = [part[tokens].to(self.compute_dtype) for part in (self.weight, self.lora_b) if part is not None]
        bias = None if self.bias is None else self.bias[tokens].to(self.compute_dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), bias

    def new_rows(self) -> Tensor:
        """An empty statistic per row `[N]`, in float32 at least."""
        return self.hidden.new_empty(len(self.targets), dtype=torch.promote_types(self.compute_dtype, torch.float32))

    def chunks(self, border: int) -> Iterator[slice]:
        """Slices of at most `chunk_rows` rows that cover all of them; none crosses `border`."""
        for first, last in ((0, border), (border, len(self.targets))):
            yield from slices(first, last, self.chunk_rows)

    def rows_of_hidden(self, rows: slice | Tensor) -> Tensor:
        """Hidden states of `rows` in the compute dtype `[n, H + r]`."""
        hidden = self.hidden[rows] if isinstance(rows, slice) else self.hidden.index_select(0, rows)
        return hidden.to(self.compute_dtype)

    def project(self, rows: slice | Tensor) -> Tensor:
        """Raw logits of `rows` `[n, V]`, in the shared buffer: the next call overwrites them."""
        hidden = self.rows_of_hidden(rows)  # [n, H + r]
        if self._buffer is None or len(self._buffer) < len(hidden):
            self._buffer = None  # freed before its successor is allocated
            self._buffer = hidden.new_empty(len(hidden), self.weight.shape[0])
        logits = self._buffer[: len(hidden)]
        matmul(hidden, self.cast_weight.t(), out=logits)  # [n, H + r] @ [H + r, V]
        if self.bias is not None:
            logits += self.bias.to(self.compute_dtype)
        return logits

    def release(self) -> None:
        """Let go of the buffer and of the cast weight."""
        self._buffer = self._cast_weight = None


class GradAccumulator:
    """
    Gradients of hidden states, weight, bias and `lora_b`, added up chunk by chunk in float32. Only those needed exist.

    Args:
        linear (`ChunkedLinear`): the rows and the head.
        needs (`Sequence[bool]`): whether hidden, weight, bias and `lora_b` need a gradient, in this order.
    """

    def __init__(self, linear: ChunkedLinear, needs: Sequence[bool]):
        self.linear = linear
        acc_dtype = torch.promote_types(linear.compute_dtype, torch.float32)
        # One GEMM makes a row's gradient whole, so nothing adds up in it; float16 alone lacks the range to hold it
        row_dtype = acc_dtype if linear.compute_dtype == torch.float16 else linear.compute_dtype
        row_dtype = torch.promote_types(row_dtype, linear.hidden.dtype)  # as fine as what is returned
        self.hidden = torch.zeros_like(linear.hidden, dtype=row_dtype) if needs[0] else None  # [N, H + r]
        self.weight = torch.empty_like(linear.weight, dtype=acc_dtype) if needs[1] else None  # [V, H]
        self.bias = torch.zeros_like(linear.bias, dtype=acc_dtype) if linear.bias is not None and needs[2] else None
        self.lora_b = (
            torch.zeros_like(linear.lora_b, dtype=acc_dtype) if linear.lora_b is not None and needs[3] else None
        )  # [V, r]
        self._weight_is_empty = True
        self._pending: float | Tensor | None = None

    def add(
        self,
        rows: slice | Tensor,
        logits: Tensor,
        lse: Tensor,
        entropies: Tensor | None,
        grad_logps: Tensor,
        grad_entropies: Tensor | None,
    ) -> None:
        """Turn the logits of `rows` `[n, V]` into their gradient, in place, and add what follows from it."""
        linear = self.linear
        self._apply_pending()
        linear.kernels.logits_grad_(
            logits, linear.targets[rows], lse, entropies, grad_logps, grad_entropies, linear.transform
        )  # [n, V]
        if self.hidden is not None:
            # [n, V] @ [V, H + r]
            if isinstance(rows, slice):
                matmul(logits, linear.cast_weight, out=self.hidden[rows])
            else:
                grad = self.hidden.new_empty(len(rows), self.hidden.shape[1])
                matmul(logits, linear.cast_weight, out=grad)
                self.hidden.index_add_(0, rows, grad)
        width = linear.weight.shape[1]
        if self.weight is not None:
            # [V, n] @ [n, H]; the first product needs no zeros to add to
            hidden = linear.rows_of_hidden(rows)[:, :width]
            (matmul if self._weight_is_empty else add_matmul)(logits.t(), hidden, out=self.weight)
            self._weight_is_empty = False
        if self.lora_b is not None:
            add_matmul(logits.t(), linear.rows_of_hidden(rows)[:, width:], out=self.lora_b)  # [V, n] @ [n, r]
        if self.bias is not None:
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def scale(self, factor: float) -> None:
        """Multiply everything by one factor: together with the cast in `finish` if nothing is added until then."""
        self._pending = None if factor == 1.0 else factor

    def scale_rows(self, factors: Tensor) -> None:
        """Multiply each row's hidden gradient by its own factor `[N]`, where no other gradient is needed."""
        self._pending = factors.unsqueeze(-1)

    def _apply_pending(self) -> None:
        if self._pending is not None:
            for grad in (self.hidden, self.weight, self.bias, self.lora_b):
                if grad is not None:
                    grad.mul_(self._pending)
            self._pending = None

    def reset(self) -> None:
        """Forget everything that was added."""
        self._pending, self._weight_is_empty = None, True
        for grad in (self.hidden, self.bias, self.lora_b):
            if grad is not None:
                grad.zero_()

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight, bias and `lora_b` in their dtypes; each is cast once, here."""
        if self.weight is not None and self._weight_is_empty:
            self.weight.zero_()
        linear = self.linear
        pairs = (
            (self.hidden, linear.hidden),
            (self.weight, linear.weight),
            (self.bias, linear.bias),
            (self.lora_b, linear.lora_b),
        )
        return tuple(
            None if grad is None or owner is None else self._finished(grad, owner.dtype) for grad, owner in pairs
        )

    def _finished(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        if self._pending is None:
            return grad.to(dtype)
        out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
        return torch.mul(grad, self._pending, out=out)


def slices(first: int, last: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` from `first` up to `last`."""
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
    """`out += a @ b` for a float32 `out`: rounding each product to bfloat16 before adding it up biases training."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
