"""
One check in place of belief: at the first step of a training, and at every `fused_verify`-th, one micro-batch is
computed by TRL's own path too.

Its log-probs are compared, and with `fused_verify` the gradient of its loss in the output projection. The training
stays the same to the bit: library modules alone run, in evaluation, so that no state of theirs advances; random numbers
are put back; gradients are asked of autograd, so that nobody reduces them or adds them to `.grad`. Unknown code is not
run twice.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.output_projection import has_adapter, output_projection

from .agreement import on_any_process
from .checks import log_no_effect
from .findings import Level, Reason
from .logps_request import LogpsArgs, PerTokenLogps
from .memory import free_memory
from .overrides import replaced_objective
from .randomness import random_states_kept, why_forwards_differ


if TYPE_CHECKING:
    from .engine import LogpsEngine


logger = logging.get_logger(__name__)

# What rounding explains at most, by the precision of the products: of log-probs the root of the mean square of the
# difference, in nats, of gradients the relative error. docs/numerics.md has the figures
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TF32_BOUND = BOUNDS[torch.float16]  # as many bits
_ROWS_AT_ONCE = 4096  # of a gradient, in float64


def why_not_checked(trainer: Any, causal_lm: PreTrainedModel) -> str | None:
    """
    Why log-probs cannot be compared with TRL's own, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose log-probs they are.
        causal_lm (`PreTrainedModel`): its causal language model, in no wrapper.
    """
    if trl_compat.shares_sequences(trainer):
        return "sequences are split over processes"
    if (reason := trainer._fused.ladder.findings.why_below(Level.HEAD)) is not None:
        return f"TRL's own log-prob method is called anyway: {reason}"
    if not trainer._fused.ladder.findings.knows_model:
        return "code of the model that is not known is not run twice"
    if has_adapter(causal_lm.get_output_embeddings()) and trl_compat.REFUSES_ADAPTER_ON_HEAD:
        return "this version of TRL leaves out an adapter on the output projection"
    if any(map(torch_compat.is_compiled, trainer.model.modules())):
        return "a compiled model does not run in parts"
    return None


def why_gradients_are_not_checked(trainer: Any, model: nn.Module, head: list[nn.Parameter]) -> str | None:
    """
    Why the gradient in the trained weights of the output projection, `head`, cannot be compared with that of TRL's own
    path, or `None`.
    """
    if not head:
        return "the output projection is frozen"
    if trainer.accelerator.state.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return "weights are split over processes"
    if (method := replaced_objective(trainer)) is not None:
        return f"{method} was replaced, and TRL's own path is another"
    if (reason := trainer._fused.ladder.findings.why_below(Level.ROWS)) is not None:
        return reason
    hooked = any(map(torch_compat.gradient_hooks, torch_compat.parameters_of(model)))
    return "a hook would see the gradient of TRL's own path" if hooked else why_forwards_differ(model)


class _Trained(NamedTuple):
    """A micro-batch that was trained: its log-probs, where they count, and how they were computed."""

    inputs: dict[str, Any]
    call: LogpsArgs
    trl_method: Callable
    result: PerTokenLogps
    mask: Tensor


class Check:
    """
    Compares a micro-batch with TRL's own path, and logs how far it is from it.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        engine ([`LogpsEngine`]): knows options and model.

    Attributes:
        is_running (`bool`): whether a micro-batch is computed for comparison.
        asks_trl (`bool`): whether it is computed by TRL's own path.
    """

    def __init__(self, trainer: GRPOTrainer, engine: "LogpsEngine"):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self.is_running = self.asks_trl = False
        self.reset()

    def reset(self) -> None:
        """Forget which step was checked last, as at the start of a training."""
        self._last_step: int | None = None
        self._had_no_memory = False
        self._trained: _Trained | None = None
        self._loss: tuple[dict[str, Any], dict[str, Any], Any] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a micro-batch of the optimizer step that runs is to be compared and none was yet."""
        if self.is_running or self._had_no_memory:
            return False
        return self._last_step is None or (self._is_asked_for and self.trainer.state.global_step != self._last_step)

    @property
    def _is_asked_for(self) -> bool:
        every = self.engine.options.fused_verify
        return every > 0 and self.trainer.state.global_step % every == 0

    def snapshot(self, micro_batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A micro-batch as TRL keeps it, and [`trl_compat.entropy_control`], before its loss is computed."""
        return dict(micro_batch), trl_compat.entropy_control(self.trainer)

    def keep(self, before: tuple[dict[str, Any], dict[str, Any]], trl_loss: Any) -> None:
        """
        Keep a micro-batch until its backward is done.

        Args:
            before (`tuple[dict, dict]`): its [`snapshot`].
            trl_loss (`functools.partial`): TRL's own `_compute_loss` with its model, for given inputs.
        """
        if self.is_due:
            self._loss = *before, trl_loss.func

    def keep_logps(self, inputs: dict[str, Any], call: LogpsArgs, trl_method: Callable, result: PerTokenLogps) -> None:
        """
        Keep the log-probs of a micro-batch until its backward is done.

        Args:
            inputs (`dict`): the micro-batch.
            call ([`LogpsArgs`]): TRL's call for them.
            trl_method (`Callable`): TRL's own method for it.
            result ([`PerTokenLogps`]): what TRL got.
        """
        if self.is_due:
            mask = trl_compat.loss_mask(self.trainer, inputs).bool()
            mask = mask if result.left_out is None else mask & ~result.left_out.unsqueeze(1)
            detached = replace(result, logps=result.logps.detach(), entropies=None, aux_loss=None)
            call = replace(call, compute_entropy=False, compute_aux_loss=False)
            self._trained = _Trained(dict(inputs), call, trl_method, detached, mask)

    def after_backward(self, compute_loss: Callable[[dict[str, Any], Callable], Tensor]) -> None:
        """
        Compare the micro-batch whose backward was the last, if one is due. All processes come here at the same steps.

        Args:
            compute_loss (`Callable`): the loss of a micro-batch by a given `_compute_loss`.
        """
        if not self.is_due:
            return
        trainer, engine = self.trainer, self.engine
        asks_for_gradients, self._last_step = self._is_asked_for, trainer.state.global_step
        trained, loss, self._trained, self._loss = self._trained, self._loss, None, None
        model, causal_lm = engine.unwrapped(trainer.model), engine.causal_lm(trainer.model)
        asked_for = f"fused_verify={engine.options.fused_verify}" if engine.options.fused_verify else None
        reason = why_not_checked(trainer, causal_lm)
        log_no_effect(asked_for, reason)
        cannot = reason is not None or trained is None or loss is None
        if on_any_process(trainer.accelerator, "check", cannot) or trained is None or loss is None:
            return
        gradient_error: float | None = None
        try:
            logps_error = self._logps_error(trained)
            head = [weight for weight in output_projection(causal_lm).parameters() if weight.requires_grad]
            reason = why_gradients_are_not_checked(trainer, model, head) if asks_for_gradients else None
            log_no_effect(f"{asked_for} for gradients", reason)
            if asks_for_gradients and not on_any_process(trainer.accelerator, "check of gradients", reason is not None):
                gradient_error = self._gradient_error(model, head, loss, compute_loss)
        except torch.OutOfMemoryError:
            # Other processes would wait for what this one did not run
            if trainer.accelerator.num_processes > 1:
                raise
            self._had_no_memory = True
            log_no_effect(asked_for, "there is no memory for TRL's own path")
            free_memory()
            return
        self._tell([logps_error, *([] if gradient_error is None else [gradient_error])], causal_lm, asks_for_gradients)

    @torch.no_grad()
    def _logps_error(self, trained: _Trained) -> float:
        """How far log-probs are from TRL's own: the root of the mean square, nats; NaN where no token counts."""
        trainer, call = self.trainer, trained.call
        if trainer.accelerator.state.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            call = replace(call, model=self.engine.unwrapped(call.model))
        modules = torch_compat.modules_of(call.model)
        in_training = [module for module in modules if module.training and model_compat.may_evaluate(module)]
        draws = why_forwards_differ(call.model) is not None
        running = temporary_attr(self, "is_running", True)
        with random_states_kept(call.input_ids), running, trainer.compute_loss_context_manager():
            for module in in_training:  # nobody's `train()` is called
                module.training = False
            try:
                expected, *_ = trl_compat.call_trl_logps(trained.trl_method, **vars(call))
                logps = trained.result.logps
                if draws:  # once more, without what is drawn at random
                    request = trainer._fused.request_of(trained.inputs)
                    logps = self.engine.compute(request, call, trained.trl_method).logps
            finally:
                for module in in_training:
                    module.training = True
                trl_compat.forget_order_of_modules(call.model)
        difference = (logps - expected)[trained.mask].double()
        return difference.square().mean().sqrt().item() if len(difference) else math.nan

    def _gradient_error(self, model: nn.Module, head: list[nn.Parameter], kept: Any, compute_loss: Any) -> float:
        """How far the gradient of the loss in the output projection is from that of TRL's own path, relative."""
        micro_batch, control, trl_loss = kept

        def run(asks_trl: bool) -> tuple[Tensor, ...]:
            with temporary_attr(self, "asks_trl", asks_trl), self._apart(micro_batch, control):
                loss = compute_loss(micro_batch, lambda inputs: trl_loss(model, inputs))
            return torch.autograd.grad(loss, head, allow_unused=True, materialize_grads=True)

        return _relative_error(run(asks_trl=False), run(asks_trl=True))

    @contextmanager
    def _apart(self, micro_batch: dict[str, Any], control: dict[str, Any]) -> Generator[None, None, None]:
        """While it lasts, a micro-batch is computed so that afterwards the training goes on as if it had not been."""
        trainer, metrics = self.trainer, trl_compat.metrics_of(self.trainer)
        attributes, logged = dict(vars(trainer)), {name: list(values) for name, values in metrics.items()}
        running, no_budget = temporary_attr(self, "is_running", True), temporary_attr(self.engine, "memory", None)
        try:
            vars(trainer).update(control)
            random_states = random_states_kept(micro_batch["completion_ids"])
            with random_states, running, no_budget, trainer.compute_loss_context_manager():
                yield
        finally:
            metrics.clear()
            metrics.update(logged)
            for name in vars(trainer).keys() - attributes.keys():
                del vars(trainer)[name]
            vars(trainer).update(attributes)  # never without them: threads of rewards and tools may look

    def _tell(self, errors: list[float], causal_lm: PreTrainedModel, logs: bool) -> None:
        """
        Log the largest errors of any process, of log-probs and, if it was asked for, of the gradient; beyond what
        rounding explains, leave the faster rows.
        """
        accelerator, metrics = self.trainer.accelerator, trl_compat.metrics_of(self.trainer)
        local = torch.tensor([errors], device=accelerator.device, dtype=torch.float32)
        told = [row for row in accelerator.gather(local).tolist() if not math.isnan(row[0])]
        if not told:
            return
        largest = [_largest(values) for values in zip(*told, strict=True)]
        if logs:
            for name, error in zip(("fused/verify_logps", "fused/verify_head_grad"), largest, strict=False):
                metrics[name].append(error)
        precision, bound = self._precision(causal_lm)
        if not all(error <= bound for error in largest):
            gradient = f", the gradient in the output projection by {largest[1]:.1e} (relative)" if largest[1:] else ""
            reason = (
                f"in optimizer step {self._last_step} log-probs differ from those of TRL's own path by "
                f"{largest[0]:.1e} nats{gradient}, more than rounding in {precision} explains ({bound:.0e}): please "
                "report it"
            )
            self.trainer._fused.ladder.fall(Reason(Level.HEAD, reason))

    def _precision(self, causal_lm: PreTrainedModel) -> tuple[str, float]:
        """In what the products of both paths are computed, in words, and the bound for it."""
        accelerator = self.trainer.accelerator
        dtype = torch_compat.dtype_of_products(accelerator, causal_lm)
        if dtype == torch.float32 and accelerator.device.type == "cuda" and torch_compat.matmuls_are_tf32():
            return "TF32", TF32_BOUND
        return str(dtype).removeprefix("torch."), BOUNDS.get(dtype, BOUNDS[torch.bfloat16])


def _relative_error(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """How far some tensors are from `others`, relative to these; 0 where they are equal."""
    squares = torch.zeros(2, dtype=torch.float64)
    for pair in zip(tensors, others, strict=True):
        for mine, other in zip(*(tensor.detach().split(_ROWS_AT_ONCE) for tensor in pair), strict=True):
            both = torch.stack([(mine.double() - other.double()).square().sum(), other.double().square().sum()])
            squares += both.cpu()
    difference, size = squares.sqrt().tolist()
    return 0.0 if difference == 0 else difference / size if size else math.inf


def _largest(errors: tuple[float, ...]) -> float:
    """The largest of some errors; NaN counts as the largest."""
    return next((error for error in errors if math.isnan(error)), max(errors))
