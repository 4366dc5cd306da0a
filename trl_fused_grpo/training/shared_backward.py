"""
The backward of a forward that micro-batches share, in one process.

Log-probs are cut off from the model, and their backward runs that of the model. When memory runs out in it, it is done
again for parts of the micro-batches: the gradients of their log-probs are known, and no loss is computed twice.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from trl_fused_grpo._compat.torch import parameters_of
from trl_fused_grpo.ops.linear_logps import FusedStats

from .logps_request import PerTokenLogps
from .memory import free_memory
from .random_states import RandomStates


# A micro-batch, and the gradients of its log-probs and of its entropies, where there are any
_Part = tuple[dict[str, Any], Tensor | None, Tensor | None]


def can_be_repeated(trainer: Any, result: PerTokenLogps, before: RandomStates) -> bool:
    """
    Whether a forward may run again for its backward.

    Args:
        trainer (`GRPOTrainer`): whose forward it was. Wrappers of several processes run a backward of their own.
        result ([`PerTokenLogps`]): of the forward.
        before ([`RandomStates`]): from before it. With other random numbers it would be another forward.
    """
    is_alone = trainer.accelerator.distributed_type == DistributedType.NO
    return is_alone and result.logps.requires_grad and before.are_current()


class SharedForward:
    """
    A forward of several micro-batches that waits for its backward.

    Args:
        trainer (`GRPOTrainer`): whose forward it is.
        micro_batches (`list[dict]`): that share it.
        compute (`Callable`): computes the log-probs of some of them.

    Attributes:
        micro_batches (`list[dict]`): as given.
        fitted (`int`): how many of them had memory for their backward together.
    """

    def __init__(
        self,
        trainer: Any,
        micro_batches: list[dict[str, Any]],
        compute: Callable[[list[dict[str, Any]]], PerTokenLogps],
    ):
        self._parameters = [parameter for parameter in parameters_of(trainer.model) if parameter.requires_grad]
        self._trainer, self.micro_batches, self._compute = trainer, micro_batches, compute
        self.fitted = len(micro_batches)
        self._result: PerTokenLogps | None = None
        self._stats: list[FusedStats] = []

    def with_own_backward(self, result: PerTokenLogps) -> PerTokenLogps:
        """
        The result of the forward, without an auxiliary loss, with the backward that is done in parts where memory runs
        out.
        """
        self._result, self._stats = result, result.stats
        entropies = result.entropies
        logps, cut_off = _ModelBackward.apply(
            result.logps.detach().requires_grad_(),
            entropies.detach().requires_grad_() if entropies is not None and entropies.requires_grad else None,
            [self],
        )
        entropies = entropies if cut_off is None else cut_off
        return PerTokenLogps(logps, entropies, None, result.stats, result.left_out)

    def backward(self, *grads: Tensor | None) -> None:
        """
        Run the model's backward.

        Args:
            grads (`Tensor`): `[B, T]`, of log-probs and of entropies; `None` for those that no loss depends on.

        Raises:
            `torch.OutOfMemoryError`: when a micro-batch alone finds no memory, or when gradients may be incomplete.
        """
        sizes = [len(batch["completion_ids"]) for batch in self.micro_batches]
        by_micro_batch: Any = ([None] * len(sizes) if grad is None else grad.split(sizes) for grad in grads)
        self._backward([*zip(self.micro_batches, *by_micro_batch, strict=True)], set())

    def _backward(self, parts: list[_Part], done: set[nn.Parameter]) -> None:
        """The backward of some micro-batches, for all weights but those that have their gradient, `done`."""
        waiting = [parameter for parameter in self._parameters if parameter not in done]
        before = [(parameter.grad, _times_written(parameter.grad)) for parameter in waiting]
        result, self._result = self._result, None
        is_first = result is not None
        try:
            with _gradients_dropped(done):
                if result is None:
                    with torch.enable_grad(), self._trainer.compute_loss_context_manager():
                        result = self._compute([batch for batch, _, _ in parts])
                _run_backward(result, parts)
            if not is_first:
                self._stats.extend(result.stats)
            self.fitted = min(self.fitted, len(parts))
            return
        except torch.OutOfMemoryError:
            if len(parts) == 1 or (result is not None and self._is_nested(result)):
                raise
        if is_first:
            self._stats.clear()
        # Autograd has added to the gradient of a weight once, when it was complete for all micro-batches
        changed = {
            parameter
            for parameter, (grad, times) in zip(waiting, before, strict=True)
            if parameter.grad is not grad or _times_written(grad) != times
        }
        del result, before
        free_memory()
        half = len(parts) // 2
        for some in (parts[:half], parts[half:]):
            self._backward(some, done | changed)

    def _is_nested(self, result: PerTokenLogps) -> bool:
        """
        Whether a part of the backward may be a backward of its own, as in checkpoints with reentrance and in aligned
        rows of several widths: it adds to gradients that are not complete. The graph does not show its weights.
        """
        shown = _weights_in_graph(result)
        return any(parameter.grad is not None and parameter not in shown for parameter in self._parameters)


class _ModelBackward(torch.autograd.Function):
    """Log-probs and entropies that are cut off from the model. Their backward is [`SharedForward.backward`]."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, entropies: Tensor | None, shared: list[SharedForward]) -> Any:
        (ctx.shared,) = shared  # in a list: autograd looks at what else its functions get
        ctx.set_materialize_grads(False)
        return logps.view_as(logps), None if entropies is None else entropies.view_as(entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.shared.backward(*grads)
        return None, None, None


def _weights_in_graph(result: PerTokenLogps) -> set[Tensor]:
    outputs = [value for value in (result.logps, result.entropies) if value is not None]
    waiting: list[Any] = [value.grad_fn for value in outputs if value.grad_fn is not None]
    seen, weights = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            weights.add(node.variable)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)
    return weights


def _run_backward(result: PerTokenLogps, parts: list[_Part]) -> None:
    _, *by_output = zip(*parts, strict=True)
    outputs = zip((result.logps, result.entropies), by_output, strict=True)
    used = [(value, torch.cat(grads)) for value, grads in outputs if value is not None and grads[0] is not None]
    torch.autograd.backward([value for value, _ in used], [grad for _, grad in used])


def _times_written(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


@contextmanager
def _gradients_dropped(parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
    """While it lasts, what a backward adds to the gradients of these weights is dropped at once."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    handles = []
    try:
        for parameter, _ in kept:
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in kept:
            parameter.grad = grad


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
