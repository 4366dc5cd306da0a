"""
One check in place of belief: at the first step of a training, and at every `fused_verify`-th, the log-probs of one
micro-batch are computed by TRL's own path too.

The training stays the same to the bit: library modules alone run, in evaluation, so that no state of theirs advances,
and random numbers are put back. Unknown code is not run twice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import temporary_mode
from trl_fused_grpo.modeling.head.output_projection import has_adapter

from .collectives import on_any_process
from .engine import LogpsEngine
from .findings import Findings, Level, Reason
from .memory import free_memory
from .refusals import log_no_effect
from .requests import LogpsArgs, LogpsRequest


logger = logging.get_logger(__name__)

# What rounding explains at most, by the precision of the products: the root of the mean square of the difference, in
# nats. docs/numerics.md has the figures
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
TF32_BOUND = BOUNDS[torch.float16]  # as many bits


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


class Check:
    """Compares a micro-batch with TRL's own path, and logs how far it is from it."""

    def __init__(
        self, trainer: GRPOTrainer, engine: LogpsEngine, build_request: Callable[[dict[str, Any]], LogpsRequest]
    ):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine, self.ladder, self.build_request = engine, engine.ladder, build_request
        self.reset()

    def reset(self) -> None:
        """Forget which step was checked last, as at the start of a training."""
        self._last_step: int | None = None
        self._had_no_memory = False

    @property
    def is_due(self) -> bool:
        """Return `True` if a micro-batch of the optimizer step that runs is to be compared and none was yet."""
        if self._had_no_memory:
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
        reason = why_not_checked(trainer, self.ladder.findings, self.engine.causal_lm(trainer.model))
        every = self.engine.options.fused_verify
        asked_for = f"fused_verify={every}" if every else None
        log_no_effect(asked_for, reason)
        if on_any_process(trainer.accelerator, "check", reason is not None):
            return
        call = replace(call, compute_entropy=False, compute_aux_loss=False)
        try:
            self._tell(self._logps_error(inputs, call, trl_method))
        except torch.OutOfMemoryError:
            if trainer.accelerator.num_processes > 1:  # which would wait for one another
                raise
            self._had_no_memory = True
            log_no_effect(asked_for, "there is no memory for TRL's own path")
            free_memory()

    @torch.no_grad()
    def _logps_error(self, inputs: dict[str, Any], call: LogpsArgs, trl_method: Callable) -> float:
        """How far log-probs are from TRL's own: the root of the mean square, nats; negative where no token counts."""
        trainer = self.trainer
        if trainer.accelerator.state.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            call = replace(call, model=self.engine.unwrapped(call.model))
        modules = torch_compat.modules_of(call.model)
        in_training = [module for module in modules if module.training and model_compat.may_evaluate(module)]
        devices = [call.input_ids.device] if call.input_ids.is_cuda else []
        with torch.random.fork_rng(devices), temporary_mode(in_training, False):
            try:
                # Logits of one row at a time, but not of a row without images among others that have some
                alone = trl_compat.LOGPS_FROM_LOGITS and not call.multimodal
                rows = 1 if alone else call.batch_size
                expected, *_ = trl_compat.call_trl_logps(trl_method, **vars(replace(call, batch_size=rows)))
                trl_compat.forget_order_of_modules(call.model)  # which the next forward would take for complete
                result = self.engine.compute(self.build_request(inputs), call, trl_method)
            finally:
                trl_compat.forget_order_of_modules(call.model)
        difference = (result.logps - expected)[trl_compat.loss_mask(trainer, inputs).bool()].double()
        return difference.square().mean().sqrt().item() if len(difference) else -1.0

    def _tell(self, error: float) -> None:
        """Log the largest error of any process; beyond what rounding explains, leave the faster rows."""
        accelerator, metrics = self.trainer.accelerator, trl_compat.metrics_of(self.trainer)
        mine = torch.tensor([error], device=accelerator.device, dtype=torch.float32)
        error = accelerator.gather(mine).amax().item()  # NaN if any is
        if error < 0:
            return
        if self._is_asked_for:
            metrics["fused/verify_logps"].append(error)
        precision, bound = self._precision(self.engine.causal_lm(self.trainer.model))
        if not error <= bound:
            reason = (
                f"in optimizer step {self._last_step} log-probs differ from those of TRL's own path by {error:.1e} "
                f"nats, more than rounding in {precision} explains ({bound:.0e}): please report it"
            )
            self.ladder.fall(Reason(Level.HEAD, reason))

    def _precision(self, causal_lm: PreTrainedModel) -> tuple[str, float]:
        """In what the products of both paths are computed, in words, and the bound for it."""
        accelerator = self.trainer.accelerator
        dtype = torch_compat.dtype_of_products(accelerator, causal_lm)
        if dtype == torch.float32 and accelerator.device.type == "cuda" and torch_compat.matmuls_are_tf32():
            return "TF32", TF32_BOUND
        return str(dtype).removeprefix("torch."), BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
