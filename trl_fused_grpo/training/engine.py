"""Log-probabilities of a trainer's batches: the layout that its model allows, in its wrappers and its precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.head.fused_forward import install_fused_forward
from trl_fused_grpo.modeling.head.output_projection import LogitScaling, logit_scaling
from trl_fused_grpo.modeling.layers.compiled import compiling, layers_to_compile, why_not_compiled
from trl_fused_grpo.modeling.layers.forward_override import restore_forward
from trl_fused_grpo.modeling.layers.memo import layers_as_they_are
from trl_fused_grpo.modeling.layers.unpacked import install_unpacking, uninstall_unpacking
from trl_fused_grpo.modeling.rows.layout_choice import (
    traits,
    why_not_packed,
    why_prompts_are_not_shared,
    why_wide_rows_differ,
)
from trl_fused_grpo.options import FusedOptions, kl_estimator_of

from .collectives import widest_batch
from .findings import Findings, Ladder, Level, Reason
from .logps import PromptsNotSharedError, RowsRefusedError, compute_logps, keep_padding, multimodal_inputs
from .memory import MemoryBudget, memory_budget
from .plan import token_counter, why_padding_is_mixed_in
from .refusals import log_no_effect
from .requests import LogpsArgs, LogpsOptions, LogpsRequest, PerTokenLogps, padding_counts


logger = logging.get_logger(__name__)


class LogpsEngine:
    """Computes log-probabilities as the options of a trainer say."""

    def __init__(self, trainer: GRPOTrainer, defaults: FusedOptions, ladder: Ladder):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.ladder = ladder
        self.options = self._defaults = defaults
        self._made_with: WeakKeyDictionary[PreTrainedModel, tuple[LogitScaling, float, bool]] = WeakKeyDictionary()
        self._unshared_with_images: WeakSet[nn.Module] = WeakSet()
        self._installed: WeakSet[PreTrainedModel] = WeakSet()
        self.memory: MemoryBudget | None = None

    def read_options(self) -> None:
        """Read the options from the trainer's arguments."""
        self.options = FusedOptions.from_args(self.trainer.args, self._defaults)
        self.memory = memory_budget(self.trainer, self.options.fused_memory)

    @property
    def kl_estimator(self) -> str:
        """The option, which may be set after construction too."""
        return kl_estimator_of(self.trainer.args, self._defaults.kl_estimator)

    def install(self, model: nn.Module) -> None:
        """Let a model's forward take the keyword `fused`. Idempotent."""
        causal_lm = self.causal_lm(model)
        install_fused_forward(causal_lm)
        self._installed.add(causal_lm)

    def uninstall(self) -> None:
        """Undo every [`install`]. Idempotent."""
        for causal_lm in list(self._installed):
            restore_forward(causal_lm)
            uninstall_unpacking(causal_lm)
        self._installed.clear()

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """A model in no wrapper but PEFT's."""
        # Where DeepSpeed is not installed, `unwrap_model` looks for it on the disk at every call
        bare = isinstance(model, PreTrainedModel) or model_compat.is_peft_model(model)
        return model if bare else self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        return model_compat.without_adapter(torch_compat.without_compiler(self.unwrapped(model)))

    def read_head_options(self, model: nn.Module) -> None:
        """Read what TRL reads of a model and the arguments when a trainer is made, if this TRL reads it then alone."""
        causal_lm = self.causal_lm(model)
        self._made_with[causal_lm] = self._head_options(causal_lm)

    def _head_options(self, causal_lm: PreTrainedModel) -> tuple[LogitScaling, float, bool]:
        """Scale and softcap, temperature, and whether the head runs in float32."""
        return logit_scaling(causal_lm), self.trainer.temperature, trainers.casts_head(self.trainer)

    def packs(self, model: nn.Module, findings: Findings, reads_padding: bool | None = None) -> bool:
        """Return `True` if a model's rows are packed: nothing else was asked for, and level and model allow it."""
        if reads_padding is None:
            reads_padding = padding_counts(self.trainer)
        policy = self.trainer.model
        is_reference = model is self.trainer.ref_model and model is not policy
        if is_reference and not self.packs(policy, self.ladder.findings, reads_padding):
            return False  # equal weights are to give equal bits
        if findings.level < Level.ROWS or self.options.fused_layout == "padded":
            return False
        with layers_as_they_are():
            reason = why_not_packed(self.unwrapped(model), self.causal_lm(model), reads_padding)
        if reason is not None and self.options.forces_rows:
            raise ValueError(f"fused_layout='packed' does not fit this model: {reason}. Leave it out.")
        if reason is not None:
            logger.warning_once(f"Rows keep TRL's padding, because {reason}.")
        return reason is None

    def shares_prompts(self, model: nn.Module) -> bool:
        """Return `True` if a prompt stands in a packed row once."""
        return self.options.fused_share_prompts and why_prompts_are_not_shared(self.causal_lm(model)) is None

    def compute(
        self,
        logps_request: LogpsRequest,  # at which positions of the batch
        call: LogpsArgs,  # TRL's call
        trl_method: Callable,  # TRL's own method for it, which knows how images belong to rows
        findings: Findings | None = None,  # those that count for the call. By default the training's
    ) -> PerTokenLogps:
        """Compute log-probabilities of a batch, and what else TRL asks for."""
        findings = self.ladder.findings if findings is None else findings
        unwrapped, accelerator = self.unwrapped(call.model), self.trainer.accelerator
        causal_lm = self.causal_lm(unwrapped)
        self.install(unwrapped)
        images = multimodal_inputs(call, trl_method) if call.multimodal else None
        shape = widest_batch(accelerator, causal_lm, (len(call.input_ids), call.input_ids.shape[1]))
        with ExitStack() as stack:
            stack.enter_context(accelerator.autocast())
            if findings.level >= Level.ROWS and findings.knows_model:
                stack.enter_context(self._compiled_layers(unwrapped))
                if self.memory is not None and torch.is_grad_enabled():
                    tokens = self.tokens_of_forward(logps_request, call, findings)
                    self.memory.begin(self.trainer.state.global_step, tokens, unwrapped.parameters())
            while True:
                options = self._logps_options(logps_request, call, findings, shape)
                if images is not None and causal_lm in self._unshared_with_images:
                    options = replace(options, share_prompts=False)
                if not options.packed:
                    if logps_request.micro_batch is not None:  # they share a forward, but are not to share padding
                        call = replace(call, batch_size=logps_request.micro_batch)
                    return compute_logps(logps_request, options, call, images)
                install_unpacking(causal_lm)
                before = RandomStates(call.input_ids)
                try:
                    return compute_logps(logps_request, options, call, images)
                except PromptsNotSharedError:
                    self._unshared_with_images.add(causal_lm)
                except RowsRefusedError as error:
                    findings = self._refuse(findings, error)
                    stack.close()  # no layer runs compiled
                    stack.enter_context(accelerator.autocast())
                before.restore()

    def tokens_of_forward(self, logps_request: LogpsRequest, call: LogpsArgs, findings: Findings) -> int:
        """Tokens that the model runs in a forward, padding included, counted as the plan counts them."""
        if not self.packs(call.model, findings, logps_request.reads_padding):
            return call.input_ids.numel()
        ids, mask, width = call.input_ids, call.attention_mask, call.logits_to_keep
        batch = {"prompt_ids": ids[:, :-width], "prompt_mask": mask[:, :-width], "completion_mask": mask[:, -width:]}
        tokens_from = token_counter([batch], self.shares_prompts(call.model))
        return ids.numel() if tokens_from is None else next(tokens_from(0))

    def layers_to_compile(self, model: nn.Module) -> tuple[list[tuple[int, Any]], str | None]:
        """The layers of a model that run compiled, each with its number, and where none do the reason."""
        reason = why_not_compiled(self.options.fused_compile, self.trainer.accelerator.device)
        return layers_to_compile(model) if reason is None else ([], reason)

    def _compiled_layers(self, model: nn.Module) -> AbstractContextManager[None]:
        """While it lasts, a model's layers run compiled, where they can."""
        layers, reason = self.layers_to_compile(model)
        log_no_effect("fused_compile=True" if self.options.fused_compile else None, reason)
        return compiling(layers)

    def _refuse(self, findings: Findings, error: RowsRefusedError) -> Findings:
        """
        Have rows keep TRL's padding from now on, and return the findings with that. All processes decide alike, because
        the decision does not depend on the batch.
        """
        if self.options.forces_rows:
            raise ValueError(f"fused_layout='packed' does not fit this model: {error}. Leave it out.") from error
        reason = Reason(Level.HEAD, str(error))
        self.ladder.fall(reason)
        return Findings((*findings.reasons, reason))

    def _logps_options(
        self, logps_request: LogpsRequest, call: LogpsArgs, findings: Findings, shape: tuple[int, int]
    ) -> LogpsOptions:
        causal_lm = self.causal_lm(call.model)
        packed = self.packs(call.model, findings, logps_request.reads_padding)
        needs_last_column = traits(causal_lm).needs_last_column
        if needs_last_column and call.compute_aux_loss:
            packed = False  # the auxiliary loss counts every token, also one that stands for the last column
        if packed and (reason := why_wide_rows_differ(causal_lm, *shape)) is not None:
            keep_padding(reason, self.options.forces_rows)
            packed = False
        now = self._head_options(causal_lm)
        scaling, temperature, fp32 = self._made_with.get(causal_lm, now)
        if trl_compat.LOGPS_FROM_LOGITS:
            scaling, temperature, _ = now
        return LogpsOptions(
            causal_lm=causal_lm,
            scaling=scaling,
            temperature=temperature,
            fp32=fp32,
            backward=self.options.fused_backward or "auto",
            logits_mib=self.options.fused_logits_mib,
            packed=packed,
            share_prompts=self.shares_prompts(call.model),
            forces_rows=self.options.forces_rows,
            needs_last_column=needs_last_column,
            is_known=findings.knows_model,
            opens_masks=not packed and findings.knows_model and why_padding_is_mixed_in(causal_lm) is None,
        )


class RandomStates:
    """States of the random number generators of the CPU and of a tensor's device."""

    def __init__(self, like: Tensor):
        self._of_cpu, self._of_device = torch.get_rng_state(), get_device_states(like)

    def restore(self) -> None:
        """Set the generators to what they were."""
        torch.set_rng_state(self._of_cpu)
        set_device_states(*self._of_device)
