"""
What is checked. Before anything is computed, what cannot be trained is refused: options and models in the trainer's
constructor, tensors at each micro-batch. The message names the option or tensor and says what to change.

And at the first step of a training, and at every `fused_verify`-th, the log-probs of one micro-batch are computed by
TRL's own path too. The training stays the same to the bit: library modules alone run, in evaluation, so that no state
of theirs advances, and random numbers are put back. Unknown code is not run twice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._utils import on_any_process, temporary_mode
from trl_fused_grpo.loss.batch import check_shapes
from trl_fused_grpo.modeling.head.moe import why_no_aux_loss
from trl_fused_grpo.modeling.head.output_projection import has_adapter, why_not_sharded
from trl_fused_grpo.options import FusedOptions

from .engine import LogpsEngine
from .findings import Findings, Level, Reason, log_no_effect, replaced_behind, replaced_method
from .memory import why_no_memory_budget
from .plan import (
    has_old_logps,
    why_no_forecast,
    why_old_logps_are_needed,
    why_zero_grad_sequences_are_not_skipped,
)
from .requests import LogpsArgs, LogpsRequest, estimator_in_force, objective_of, replaces_kl


logger = logging.get_logger(__name__)


def check_backward(trainer: GRPOTrainer, backward: str | None) -> None:
    """Raise when `fused_backward="forecast"` is asked for and a batch of the training may have no forecast."""
    reason = why_no_forecast(trainer) if backward == "forecast" else None
    if reason is not None:
        raise ValueError(
            f"fused_backward='forecast' needs a gradient that follows from each token's own log-prob, but {reason}; "
            "or leave fused_backward out, which forecasts where it can."
        )


def log_what_has_no_effect(trainer: Any, options: FusedOptions, findings: Findings, packed: bool) -> None:
    """Log once which options were asked for and have no effect, with the reason, at the end of construction."""
    reasons: dict[str, str | None] = {}
    if options.fused_skip_old_logps:
        none = "TRL computes none where no weight moves while a generation batch is in use"
        reasons["fused_skip_old_logps"] = (
            why_old_logps_are_needed(trainer, findings) if has_old_logps(trainer) else none
        )
    if options.fused_skip_zero_grad_sequences:
        reasons["fused_skip_zero_grad_sequences"] = why_zero_grad_sequences_are_not_skipped(trainer, packed)
    if options.fused_memory is not None:
        reasons["fused_memory"] = why_no_memory_budget(trainer)
    if options.fused_keep_base_weights:
        reasons["fused_keep_base_weights"] = why_base_weights_stay(trainer)
    for option, reason in reasons.items():
        log_no_effect(f"{option}={getattr(options, option)}", reason)


def why_base_weights_stay(trainer: Any) -> str | None:
    """Why no adapter is merged into weights and taken out again in a training, or `None`."""
    if not model_compat.is_peft_model(trainer.model) or model_compat.is_prompt_learning(trainer.model):
        return "the model has no adapters"
    return None if trainer.use_vllm else "adapters are merged for vLLM alone"


def check_kl_estimator(trainer: Any, name: str) -> None:
    """
    Raise when another `kl_estimator` than TRL's `"k3"` is asked for and would not be trained. Log once when there is no
    KL term, and when `use_bias_correction_kl` turns the estimator into another.
    """
    if name == "k3":
        return
    if trainers.beta_of_loss(trainer) == 0.0:
        reason = (
            "RLOO has its KL term in the reward" if trainers.is_rloo(trainer) else "beta=0.0 leaves the KL term out"
        )
        logger.warning_once(f"kl_estimator={name!r} has no effect, because {reason}.")
    elif not trainer.use_liger_loss:
        raise ValueError(
            f"use_liger_loss=False trains with TRL's own KL term, not with kl_estimator={name!r}: set "
            "use_liger_loss=True, or kl_estimator='k3'."
        )
    elif replaces_kl(trainer, name) and not (objective := objective_of(trainer, kl_estimator=name)).effective_reduction:
        raise ValueError(
            f"kl_estimator={name!r} does not know how loss_type={trainer.loss_type!r} is averaged: set "
            "kl_estimator='k3'."
        )
    elif (computed := estimator_in_force(objective)) != name:
        logger.warning_once(
            f"use_bias_correction_kl=True multiplies the KL term by the importance ratio: kl_estimator={name!r} then "
            f"is {computed!r} and is logged as kl/{computed}. For {name!r} itself set use_bias_correction_kl=False."
        )


def check_aux_loss(trainer: Any, causal_lm: PreTrainedModel) -> None:
    """Raise when an auxiliary loss is asked for and the model has none."""
    if not trl_compat.has_aux_loss(trainer):
        return
    reason = why_no_aux_loss(causal_lm)
    if reason is not None:
        raise ValueError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} asks for the auxiliary loss of "
            f"{type(causal_lm).__name__}, but {reason}: set router_aux_loss_coef=0.0."
        )


def check_sharding(trainer: GRPOTrainer, causal_lm: PreTrainedModel) -> None:
    """Raise when FSDP cannot shard the output projection with its adapter."""
    state = trainer.accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        return
    reason = why_not_sharded(causal_lm, getattr(state.fsdp_plugin, "fsdp_version", 1))
    if reason is not None:
        raise ValueError(f"the adapter on the output projection of {type(causal_lm).__name__} cannot train: {reason}.")


def log_that_nothing_is_fused(trainer: Any) -> None:
    """Log once that a training step ended without a call of TRL's log-prob method, which is what is fused."""
    method = replaced_method(trainer, ("_get_per_token_logps_and_entropies", *trainers.STEP_METHODS))
    reason = "the loss does not ask for them" if method is None else f"{method} does not ask for them with super()"
    logger.warning_once(f"No log-probs come from the fused linear function, because {reason}.")


def check_trl_logps(trainer: Any, causal_lm: PreTrainedModel, reason: str | None) -> None:
    """Raise where TRL's own log-prob method is called and would leave something out."""
    if reason is None:
        return
    leaves_out = trl_compat.REFUSES_ADAPTER_ON_HEAD and has_adapter(causal_lm.get_output_embeddings())
    if leaves_out and replaced_behind(trainer, "_get_per_token_logps_and_entropies") is None:
        raise ValueError(
            f"TRL's own log-prob method must be called, because {reason}, but it leaves out the adapter on the output "
            "projection: remove the one or the other."
        )


def check_head(trainer: GRPOTrainer, head: nn.Module) -> None:
    """Raise when an output projection and the options exclude each other."""
    if has_adapter(head) and trainers.casts_head(trainer):
        raise ValueError(
            "cast_lm_head_to_fp32=True does not go with a PEFT adapter on lm_head: remove 'lm_head' from "
            "target_modules, or set cast_lm_head_to_fp32=False."
        )


def check_micro_batch(inputs: dict[str, Any]) -> None:
    """Raise when a tensor of a micro-batch does not fit its completions."""
    per_token = ("completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
    check_shapes(
        inputs["completion_ids"],
        per_token={name: inputs.get(name) for name in per_token},
        per_sequence={name: inputs.get(name) for name in ("advantages", "old_logps")},
        broadcast={"importance_sampling_ratio": inputs.get("importance_sampling_ratio")},
        ids_name="completion_ids",
    )


# Log-probs beside TRL's


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
        if not self.ladder.has_one_loss:
            reason = "a method of the loss was replaced on some processes, which may not come here"
        every = self.engine.options.fused_verify
        asked_for = f"fused_verify={every}" if every else None
        log_no_effect(asked_for, reason)
        if not self.ladder.has_one_loss or on_any_process(trainer.accelerator, "check", reason is not None):
            return
        call = replace(call, compute_entropy=False, compute_aux_loss=False)
        try:
            while self._falls(self._logps_error(inputs, call, trl_method)):
                pass  # the rows that are left are compared too
        except torch.OutOfMemoryError:
            if trainer.accelerator.num_processes > 1:  # which would wait for one another
                raise
            self._had_no_memory = True
            log_no_effect(asked_for, "there is no memory for TRL's own path")
            clear_device_cache(garbage_collection=True)

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
                expected, *_ = trl_compat.call_trl_logps(trl_method, **vars(call))
                trl_compat.forget_order_of_modules(call.model)  # which the next forward would take for complete
                result = self.engine.compute(self.build_request(inputs), call, trl_method)
            finally:
                trl_compat.forget_order_of_modules(call.model)
        difference = (result.logps - expected)[trl_compat.loss_mask(trainer, inputs).bool()].double()
        return difference.square().mean().sqrt().item() if len(difference) else -1.0

    def _falls(self, error: float) -> bool:
        """
        Log the largest error of any process. Beyond what rounding explains leave the faster rows, or where rows have
        TRL's padding the head. Return `True` if the head is left to compare.
        """
        accelerator, metrics = self.trainer.accelerator, trl_compat.metrics_of(self.trainer)
        mine = torch.tensor([error], device=accelerator.device, dtype=torch.float32)
        error = accelerator.gather(mine).amax().item()  # NaN if any is
        if error < 0:
            return False
        if self._is_asked_for:
            metrics["fused/verify_logps"].append(error)
        precision, bound = self._precision(self.engine.causal_lm(self.trainer.model))
        if error <= bound:
            return False
        has_padding = self.ladder.level <= Level.HEAD
        rows = " in TRL's padding" if has_padding else ""
        reason = (
            f"in optimizer step {self._last_step} log-probs differ from those of TRL's own path by {error:.1e} nats"
            f"{rows}, more than rounding in {precision} explains ({bound:.0e}): please report it"
        )
        self.ladder.fall(Reason(Level.STOCK if has_padding else Level.HEAD, reason))
        return not has_padding

    def _precision(self, causal_lm: PreTrainedModel) -> tuple[str, float]:
        """In what the products of both paths are computed, in words, and the bound for it."""
        accelerator = self.trainer.accelerator
        dtype = torch_compat.dtype_of_products(accelerator, causal_lm)
        if dtype == torch.float32 and accelerator.device.type == "cuda" and torch_compat.matmuls_are_tf32():
            return "TF32", TF32_BOUND
        return str(dtype).removeprefix("torch."), BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
