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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

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
from trl_fused_grpo.modeling.head.output_projection import has_adapter, output_projection

from .collectives import on_any_process
from .engine import LogpsEngine
from .findings import Findings, Level, Reason, replaced_method, replaced_objective
from .memory import free_memory
from .plan import why_forwards_differ
from .refusals import log_no_effect
from .requests import LogpsArgs, LogpsRequest


logger = logging.get_logger(__name__)

# What rounding explains at most, by the precision of the products: of log-probs the root of the mean square of the
# difference, in nats, of gradients the relative error. docs/numerics.md has the figures
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TF32_BOUND = BOUNDS[torch.float16]  # as many bits
_ROWS_AT_ONCE = 4096  # of a gradient, in float64


def why_not_checked(trainer: Any, findings: Findings, causal_lm: PreTrainedModel) -> str | None:
    """Why log-probs cannot be compared with TRL's own, or `None`."""
    if trl_compat.shares_sequences(trainer):
        return "sequences are split over processes"
    if (reason := findings.why_below(Level.HEAD)) is not None:
        return f"TRL's own log-prob method is called anyway: {reason}"
    if not findings.knows_model:
        return "code of the model that is not known is not run twice"
    if has_adapter(causal_lm.get_output_embeddings()) and trl_compat.REFUSES_ADAPTER_ON_HEAD:
        return "this version of TRL leaves out an adapter on the output projection"
    parts = [] if trl_compat.LOGPS_FROM_LOGITS else torch_compat.modules_of(causal_lm.get_output_embeddings())
    if any(torch_compat.without_fsdp1(part) is not part for part in parts):
        return "TRL's own path does not gather an output projection that FSDP1 shards by itself"
    if any(map(torch_compat.is_compiled, trainer.model.modules())):
        return "a compiled model does not run in parts"
    return None


def why_gradients_are_not_checked(
    trainer: Any, findings: Findings, model: nn.Module, head: list[nn.Parameter]
) -> str | None:
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
    if (reason := findings.why_below(Level.ROWS)) is not None:
        return reason
    if (
        method := replaced_method(trainer, ["compute_loss_context_manager", "autocast_smart_context_manager"])
    ) is not None:
        return f"{method} would be called once more"
    hooked = any(map(torch_compat.gradient_hooks, torch_compat.parameters_of(model)))
    return "a hook would see the gradient of TRL's own path" if hooked else why_forwards_differ(model)


class Check:
    """Compares a micro-batch with TRL's own path, and logs how far it is from it."""

    def __init__(
        self, trainer: GRPOTrainer, engine: LogpsEngine, build_request: Callable[[dict[str, Any]], LogpsRequest]
    ):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine, self.ladder, self.build_request = engine, engine.ladder, build_request
        self.is_running = self.asks_trl = False
        self.reset()

    def reset(self) -> None:
        """Forget which step was checked last, as at the start of a training."""
        self._last_step: int | None = None
        self._had_no_memory = self._awaits_gradients = False
        self._loss: tuple[dict[str, Any], dict[str, Any], Any] | None = None

    @property
    def is_due(self) -> bool:
        """Return `True` if a micro-batch of the optimizer step that runs is to be compared and none was yet."""
        if self.is_running or self._had_no_memory:
            return False
        return self._last_step is None or (self._is_asked_for and self.trainer.state.global_step != self._last_step)

    @property
    def _is_asked_for(self) -> bool:
        every = self.engine.options.fused_verify
        return every > 0 and self.trainer.state.global_step % every == 0

    def compare_logps(self, inputs: dict[str, Any], call: LogpsArgs, trl_method: Callable) -> None:
        """
        Compare the log-probs of a micro-batch before it is trained on, if one is due. All processes come here at the
        same steps.
        """
        if not self.is_due:
            return
        trainer, self._last_step = self.trainer, self.trainer.state.global_step
        self._awaits_gradients = self._is_asked_for
        reason = why_not_checked(trainer, self.ladder.findings, self.engine.causal_lm(trainer.model))
        log_no_effect(self._asked_for, reason)
        if on_any_process(trainer.accelerator, "check", reason is not None):
            self._awaits_gradients = False
            return
        with self._memory_expected():
            error = self._logps_error(inputs, replace(call, compute_entropy=False, compute_aux_loss=False), trl_method)
            self._tell("fused/verify_logps", error, "log-probs differ from those of TRL's own path by {} nats")

    @property
    def _asked_for(self) -> str | None:
        every = self.engine.options.fused_verify
        return f"fused_verify={every}" if every else None

    @contextmanager
    def _memory_expected(self) -> Generator[None, None, None]:
        """Where memory runs out in it, one process goes on without checks; several would wait for one another."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.trainer.accelerator.num_processes > 1:
                raise
            self._had_no_memory, self._awaits_gradients = True, False
            log_no_effect(self._asked_for, "there is no memory for TRL's own path")
            free_memory()

    @torch.no_grad()
    def _logps_error(self, inputs: dict[str, Any], call: LogpsArgs, trl_method: Callable) -> float:
        """How far log-probs are from TRL's own: the root of the mean square, nats; negative where no token counts."""
        trainer = self.trainer
        if trainer.accelerator.state.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            call = replace(call, model=self.engine.unwrapped(call.model))
        modules = torch_compat.modules_of(call.model)
        in_training = [module for module in modules if module.training and model_compat.may_evaluate(module)]
        running = temporary_attr(self, "is_running", True)
        with _random_states_kept(call.input_ids), running:
            for module in in_training:  # nobody's `train()` is called
                module.training = False
            try:
                # Logits of one row at a time, but not of a row without images among others that have some
                alone = trl_compat.LOGPS_FROM_LOGITS and not call.multimodal
                rows = 1 if alone else call.batch_size
                expected, *_ = trl_compat.call_trl_logps(trl_method, **vars(replace(call, batch_size=rows)))
                trl_compat.forget_order_of_modules(call.model)  # which the next forward would take for complete
                result = self.engine.compute(self.build_request(inputs), call, trl_method)
            finally:
                for module in in_training:
                    module.training = True
                trl_compat.forget_order_of_modules(call.model)
        difference = (result.logps - expected)[trl_compat.loss_mask(trainer, inputs).bool()].double()
        return difference.square().mean().sqrt().item() if len(difference) else -1.0

    def snapshot(self, micro_batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A micro-batch as TRL keeps it, and [`trl_compat.entropy_control`], before its loss is computed."""
        return dict(micro_batch), trl_compat.entropy_control(self.trainer)

    def keep(self, before: tuple[dict[str, Any], dict[str, Any]], trl_loss: Any) -> None:
        """Keep a micro-batch until its backward is done."""
        if self._awaits_gradients:
            self._loss = *before, trl_loss.func

    def after_backward(self, compute_loss: Callable[[dict[str, Any], Callable], Tensor]) -> None:
        """
        Compare the gradient in the output projection of the micro-batch whose backward was the last, if it is asked
        for. All processes come here at the same steps.
        """
        if not self._awaits_gradients or self.is_running:
            return
        self._awaits_gradients, loss, self._loss = False, self._loss, None
        trainer, engine = self.trainer, self.engine
        model, causal_lm = engine.unwrapped(trainer.model), engine.causal_lm(trainer.model)
        head = [weight for weight in output_projection(causal_lm).parameters() if weight.requires_grad]
        reason = why_gradients_are_not_checked(trainer, self.ladder.findings, model, head)
        log_no_effect(f"{self._asked_for} for gradients", reason)
        cannot = reason is not None or loss is None or not loss[0]["advantages"].any()  # all would be rounding
        if on_any_process(trainer.accelerator, "check of gradients", cannot) or loss is None:
            return
        with self._memory_expected():
            error = self._gradient_error(model, head, loss, compute_loss)
            text = "the gradient in the output projection differs from that of TRL's own path by {} (relative)"
            self._tell("fused/verify_head_grad", error, text)

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
            random_states = _random_states_kept(micro_batch["completion_ids"])
            with random_states, running, no_budget, trainer.compute_loss_context_manager():
                yield
        finally:
            metrics.clear()
            metrics.update(logged)
            for name in vars(trainer).keys() - attributes.keys():
                del vars(trainer)[name]
            vars(trainer).update(attributes)  # never without them: threads of rewards and tools may look

    def _tell(self, metric: str, error: float, text: str) -> None:
        """Log the largest error of any process; beyond what rounding explains, leave the faster rows."""
        accelerator, metrics = self.trainer.accelerator, trl_compat.metrics_of(self.trainer)
        errors = accelerator.gather(torch.tensor([error], device=accelerator.device, dtype=torch.float32)).tolist()
        errors = [one for one in errors if not one < 0]
        if not errors:
            return
        error = next((one for one in errors if math.isnan(one)), max(errors))
        if self._is_asked_for:
            metrics[metric].append(error)
        precision, bound = self._precision(self.engine.causal_lm(self.trainer.model))
        if not error <= bound:
            reason = f"in optimizer step {self._last_step} {text.format(f'{error:.1e}')}"
            reason = f"{reason}, more than rounding in {precision} explains ({bound:.0e}): please report it"
            self.ladder.fall(Reason(Level.HEAD, reason))

    def _precision(self, causal_lm: PreTrainedModel) -> tuple[str, float]:
        """In what the products of both paths are computed, in words, and the bound for it."""
        accelerator = self.trainer.accelerator
        dtype = torch_compat.dtype_of_products(accelerator, causal_lm)
        if dtype == torch.float32 and accelerator.device.type == "cuda" and torch_compat.matmuls_are_tf32():
            return "TF32", TF32_BOUND
        return str(dtype).removeprefix("torch."), BOUNDS.get(dtype, BOUNDS[torch.bfloat16])


def _random_states_kept(like: Tensor) -> AbstractContextManager[None]:
    """Afterwards random numbers, of the CPU and of a tensor's device, go on as if nothing had been drawn."""
    return torch.random.fork_rng([like.device] if like.is_cuda else [])


def _relative_error(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """How far some tensors are from `others`, relative to these; 0 where they are equal."""
    squares = torch.zeros(2, dtype=torch.float64)
    for pair in zip(tensors, others, strict=True):
        for mine, other in zip(*(tensor.detach().split(_ROWS_AT_ONCE) for tensor in pair), strict=True):
            both = torch.stack([(mine.double() - other.double()).square().sum(), other.double().square().sum()])
            squares += both.cpu()
    difference, size = squares.sqrt().tolist()
    return 0.0 if difference == 0 else difference / size if size else math.inf
