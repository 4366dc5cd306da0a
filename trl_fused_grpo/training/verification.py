"""
`fused_verify`: every so many optimizer steps, a micro-batch that was trained is computed by TRL's own path too.

Both paths get the same weights, micro-batch and random numbers, and the model in no wrapper: gradients are asked of
autograd, so that nobody reduces them or adds them to `.grad`. The backbone runs without gradient. Its hidden states are
where the graph of each path begins, then come head and loss.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.output_projection import has_adapter, output_projection

from .agreement import on_any_process
from .checks import log_no_effect
from .customisation import replaced_behind, replaced_method
from .customised_model import gradient_hook, row_reader
from .eligibility import why_not_fused
from .memory import free_memory
from .noise import why_forwards_differ
from .random_states import random_states_kept


if TYPE_CHECKING:
    from .engine import LogpsEngine


logger = logging.get_logger(__name__)

# What rounding explains at most, relative, by the precision of the products. docs/numerics.md has the figures
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TF32_BOUND = BOUNDS[torch.float16]  # as many bits
_ROWS_AT_ONCE = 4096  # of a gradient, in float64


def why_not_verified(trainer: Any, model: nn.Module, causal_lm: PreTrainedModel) -> str | None:
    """
    Why a micro-batch cannot be compared with TRL's own path, or `None`.

    Args:
        trainer (`GRPOTrainer`): whose micro-batch it is.
        model (`nn.Module`): in no wrapper but PEFT's.
        causal_lm (`PreTrainedModel`): the causal language model inside.
    """
    kind = trainer.accelerator.state.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED) or trl_compat.shares_sequences(trainer):
        return "weights or sequences are split over processes"
    own = replaced_behind(trainer, "_compute_loss") or replaced_method(
        trainer, ("_get_per_token_logps_and_entropies", *trl_compat.OBJECTIVE_METHODS)
    )
    if own is not None:
        return f"{own} was replaced, and TRL's own path is another"
    reason = why_not_fused(trainer, model, causal_lm)
    if reason is not None:
        return f"TRL's own log-prob method is called anyway: {reason}"
    if has_adapter(causal_lm.get_output_embeddings()) and trl_compat.REFUSES_ADAPTER_ON_HEAD:
        return "this version of TRL leaves out an adapter on the output projection"
    if any(map(torch_compat.is_compiled, model.modules())):
        return "a compiled model does not run in parts"
    reader = row_reader(model.modules())
    if reader is not None:
        return f"{reader} may keep what it has seen"
    hook = gradient_hook(model)
    return f"{hook} would see the gradient of TRL's own path" if hook is not None else why_forwards_differ(model)


class HeadGradients(NamedTuple):
    """
    What a loss gives back to the output projection.

    Args:
        weights (`list[Tensor]`): gradients of its trained parameters; none for a frozen one.
        features (`Tensor`): `[H]`, float32: the gradient of a factor at each feature of the hidden states, which is
            one, like the weight of a norm. It does not depend on the layout of the rows.
    """

    weights: list[Tensor]
    features: Tensor

    def error(self, other: "HeadGradients") -> float:
        """How far these gradients are from `other`, relative to it: the larger error of weights and hidden states."""
        return max(_relative_error(self.weights, other.weights), _relative_error([self.features], [other.features]))


class Snapshot(NamedTuple):
    """A micro-batch as TRL keeps it, and [`trl_compat.entropy_control`], as they are before the loss is computed."""

    micro_batch: dict[str, Any]
    control: dict[str, Any]


class Verification:
    """
    Compares a micro-batch of every so many optimizer steps with TRL's own path, and logs how far it is from it.

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
        """Forget which step was verified last, as at the start of a training."""
        self._last_step: int | None = None
        self._had_no_memory = False
        self._trained: tuple[Snapshot, Any, Tensor] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a micro-batch of the optimizer step that runs is to be compared and none was yet."""
        every, step = self.engine.options.fused_verify, self.trainer.state.global_step
        return every > 0 and step % every == 0 and step != self._last_step and not self._had_no_memory

    def snapshot(self, micro_batch: dict[str, Any]) -> Snapshot:
        """What is to be kept of a micro-batch, before its loss is computed."""
        return Snapshot(dict(micro_batch), trl_compat.entropy_control(self.trainer))

    def keep(self, before: Snapshot, trl_loss: Any, loss: Tensor) -> None:
        """
        Keep a micro-batch until its backward is done.

        Args:
            before ([`Snapshot`]): of the micro-batch.
            trl_loss (`functools.partial`): TRL's own `_compute_loss` with its model, for given inputs.
            loss (`Tensor`): that it was trained with, a scalar.
        """
        if self.is_due:
            self._trained = before, trl_loss.func, loss.detach()

    def after_backward(self, compute_loss: Callable[[dict[str, Any], Callable], Tensor]) -> None:
        """
        Compare the micro-batch whose backward was the last, if one is due. All processes come here at the same steps.

        Args:
            compute_loss (`Callable`): the loss of a micro-batch by a given `_compute_loss`.
        """
        if not self.is_due:
            return
        trainer, engine = self.trainer, self.engine
        self._last_step = trainer.state.global_step
        trained, self._trained = self._trained, None
        model, causal_lm = engine.unwrapped(trainer.model), engine.causal_lm(trainer.model)
        reason = why_not_verified(trainer, model, causal_lm)
        log_no_effect(f"fused_verify={engine.options.fused_verify}", reason)
        if on_any_process(trainer.accelerator, "verification", bool(reason) or trained is None) or trained is None:
            return
        before, trl_loss, loss = trained
        micro_batch = before.micro_batch

        def run(asks_trl: bool) -> tuple[Tensor, HeadGradients | None]:
            with temporary_attr(self, "asks_trl", asks_trl), self._apart(before):
                return _loss_and_gradients(causal_lm, lambda: compute_loss(micro_batch, lambda i: trl_loss(model, i)))

        try:
            expected, gradients = run(asks_trl=True)
            _, fused_gradients = run(asks_trl=False)
        except torch.OutOfMemoryError:
            # Other processes would wait for what this one did not run
            if trainer.accelerator.num_processes > 1:
                raise
            self._had_no_memory = True
            log_no_effect("fused_verify", "there is no memory for TRL's own path")
            free_memory()
            return
        if gradients is None or fused_gradients is None:
            log_no_effect("fused_verify", "TRL's own path does not call the model's backbone")
            return
        self._log(self._loss_error(loss, expected, micro_batch), fused_gradients.error(gradients), causal_lm)

    @contextmanager
    def _apart(self, before: Snapshot) -> Generator[None, None, None]:
        """While it lasts, a micro-batch is computed so that afterwards the training goes on as if it had not been."""
        trainer, metrics = self.trainer, trl_compat.metrics_of(self.trainer)
        attributes, logged = dict(vars(trainer)), {name: list(values) for name, values in metrics.items()}
        random_states = random_states_kept(before.micro_batch["completion_ids"])
        running, no_budget = temporary_attr(self, "is_running", True), temporary_attr(self.engine, "memory", None)
        try:
            vars(trainer).update(before.control)
            with random_states, running, no_budget, trainer.compute_loss_context_manager():
                yield
        finally:
            metrics.clear()
            metrics.update(logged)
            for name in vars(trainer).keys() - attributes.keys():
                del vars(trainer)[name]
            vars(trainer).update(attributes)  # never without them: threads of rewards and tools may look

    def _loss_error(self, loss: Tensor, expected: Tensor, micro_batch: dict[str, Any]) -> float:
        """
        How far the loss that was trained is from TRL's own, relative to it. On-policy it is a sum that cancels: then
        relative to the mean size of the advantages. NaN where these are all zero, which tells nothing.
        """
        size = micro_batch["advantages"].abs().mean().item() / trainers.accumulation_in_loss(self.trainer)
        return abs(float(loss) - float(expected)) / max(abs(float(expected)), size) if size else math.nan

    def _log(self, loss_error: float, gradient_error: float, causal_lm: PreTrainedModel) -> None:
        """Log the largest errors of any process, and warn beyond what rounding explains."""
        accelerator, metrics = self.trainer.accelerator, trl_compat.metrics_of(self.trainer)
        if math.isnan(loss_error):
            gradient_error = math.nan
        errors = torch.tensor([[loss_error, gradient_error]], device=accelerator.device)
        told = [errors for errors in accelerator.gather(errors).tolist() if not math.isnan(errors[0])]
        if not told:
            return
        loss_error, gradient_error = (_largest(errors) for errors in zip(*told, strict=True))
        metrics["fused/verify_loss"].append(loss_error)
        metrics["fused/verify_head_grad"].append(gradient_error)
        precision, bound = self._precision(causal_lm)
        if not (loss_error <= bound and gradient_error <= bound):
            logger.warning(
                f"fused_verify: in optimizer step {self._last_step} the loss differs from that of TRL's own path by "
                f"{loss_error:.1e}, and the gradient in the output projection by {gradient_error:.1e} (relative), more "
                f"than rounding in {precision} explains ({bound:.0e}). Train with use_liger_loss=False, run "
                "`trl-fused-grpo parity`, and report what differs."
            )

    def _precision(self, causal_lm: PreTrainedModel) -> tuple[str, float]:
        """In what the products of both paths are computed, in words, and the bound for it."""
        accelerator = self.trainer.accelerator
        dtype = torch_compat.dtype_of_products(accelerator, causal_lm)
        if dtype == torch.float32 and accelerator.device.type == "cuda" and torch_compat.matmuls_are_tf32():
            return "TF32", TF32_BOUND
        return str(dtype).removeprefix("torch."), BOUNDS.get(dtype, BOUNDS[torch.bfloat16])


def _loss_and_gradients(
    causal_lm: PreTrainedModel, compute: Callable[[], Tensor]
) -> tuple[Tensor, HeadGradients | None]:
    """A loss, a scalar, and its gradients in the output projection; `None` where the backbone was not called."""
    parameters = [parameter for parameter in output_projection(causal_lm).parameters() if parameter.requires_grad]
    with _hidden_states_as_leaves(causal_lm) as leaves:
        loss = compute()
    if not leaves:
        return loss.detach(), None
    gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, materialize_grads=True)
    features = torch.stack(
        [
            torch.einsum("nh,nh->h", leaf.detach().flatten(0, -2).float(), gradient.flatten(0, -2).float())
            for leaf, gradient in zip(leaves, gradients, strict=False)
        ]
    ).sum(0)  # [H]
    return loss.detach(), HeadGradients([g.detach() for g in gradients[len(leaves) :]], features)


@contextmanager
def _hidden_states_as_leaves(causal_lm: PreTrainedModel) -> Generator[list[Tensor], None, None]:
    """While it lasts, the backbone of a model runs without gradient; its hidden states are leaves, listed here."""
    backbone, leaves = architecture.backbone(causal_lm), []
    forward = backbone.forward

    def without_gradient(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            outputs = forward(*args, **kwargs)
        if isinstance(outputs, tuple):
            leaves.append(outputs[0].detach().requires_grad_())
            return leaves[-1], *outputs[1:]
        outputs.last_hidden_state = outputs.last_hidden_state.detach().requires_grad_()
        leaves.append(outputs.last_hidden_state)
        return outputs

    with temporary_attr(backbone, "forward", without_gradient):
        yield leaves


def _relative_error(tensors: list[Tensor], others: list[Tensor]) -> float:
    """How far some tensors are from `others`, relative to these; 0 where they are equal, or where there are none."""
    squares = torch.zeros(2, dtype=torch.float64)
    for pair in zip(tensors, others, strict=True):
        for mine, other in zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in pair), strict=True):
            both = torch.stack([(mine.double() - other.double()).square().sum(), other.double().square().sum()])
            squares += both.cpu()
    difference, size = squares.sqrt().tolist()
    return 0.0 if difference == 0 else difference / size if size else math.inf


def _largest(errors: tuple[float, ...]) -> float:
    """The largest of some errors; NaN counts as the largest."""
    return next((error for error in errors if math.isnan(error)), max(errors))
