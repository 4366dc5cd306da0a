"""
The tokens of shared forwards, and what layers keep for backward instead of computing it again: in the memory that TRL's
padding and gradients would take, or in that of `fused_memory`.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat.architecture import text_model
from trl_fused_grpo.modeling.kept_activations import KeptActivations, LastLayers, LayerBytes, MeasuredActivations
from trl_fused_grpo.modeling.layer_memo import layers_of
from trl_fused_grpo.modeling.layout import LayoutName

from .agreement import of_all_processes
from .first_forward import MOST_OF_FIRST, GradientMemory, TokenLimits, gradient_memory, why_memory_is_taken
from .logps_request import LogpsArgs, LogpsRequest
from .merge_plan import tokens_of_forward


logger = logging.get_logger(__name__)

GIB = 2**30
# More tokens at once gain little on one H200 (`benchmarks/NOTES.md`)
MAX_TOKENS = 16_384
# The optimizer's states exist after the first step, and the second one shows what a step takes
LEARNED_AT_STEP = 2
# A forward of so many times the tokens of those before shows anew what it takes
MOST_GROWTH = 1.1
# Of the budget: the allocator cannot use every gap
USABLE = 0.95


class DeviceMemory:
    """The memory of a CUDA device, in bytes."""

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def total(self) -> int:
        """All of it."""
        return torch.cuda.get_device_properties(self.device).total_memory

    @property
    def allocated(self) -> int:
        """What tensors of this process take."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        """The most that they took at once since [`forget_peak`]."""
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        """Start to count the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)


class MemoryBudget:
    """
    Decides what the layers of a forward keep. In the first two optimizer steps, and in a forward of many more tokens
    than before, it only learns what a forward takes with every layer checkpointed.

    What layers keep is there when backward begins and gone when it ends, and the gradients of weights the other way
    round. The last layers, which backward comes to first, give up the most: so memory is largest at one of the ends.

    Args:
        fraction (`float`): of the device's memory that may be taken.
        memory ([`DeviceMemory`]): the device's.
    """

    def __init__(self, fraction: float, memory: DeviceMemory):
        self.memory = memory
        self.limit = int(fraction * memory.total * USABLE)
        # A forward, its tokens, what was allocated before it, and of that what is no gradient
        self._open: tuple[MeasuredActivations, int, int, int] | None = None
        self._of_layers: list[LayerBytes] = []
        self._tokens = 1  # of the forward that all of these are of
        self._at_start = 0  # of its backward, beyond what was allocated before it
        self._in_all = 0  # until the end of its backward, gradients included, beyond what is no gradient

    def plan(self, step: int, tokens: int, parameters: Iterable[nn.Parameter]) -> KeptActivations:
        """
        What the layers keep in the next forward with gradients.

        Args:
            step (`int`): optimizer steps so far.
            tokens (`int`): of the forward.
            parameters (`Iterable[nn.Parameter]`): of the model.
        """
        parameters = list(parameters)
        allocated = self.memory.allocated
        stays = allocated - sum(map(_bytes_of_gradient, parameters))
        if step < LEARNED_AT_STEP or tokens > MOST_GROWTH * self._tokens:
            self.memory.forget_peak()
            measured = MeasuredActivations(parameters, lambda: self.memory.peak)
            self._open = measured, tokens, allocated, stays
            return measured
        grown = max(1.0, tokens / self._tokens)
        missing = stays + grown * self._in_all - self.limit
        if missing > 0:
            logger.warning_once(
                f"fused_memory has no effect: {self.limit / GIB:.1f} GiB are less than the training takes with every "
                f"layer checkpointed, {(self.limit + missing) / GIB:.1f} GiB."
            )
            return KeptActivations()
        free = max(0, self.limit - allocated - int(grown * self._at_start))
        share = tokens / self._tokens
        attention_bytes = min(free, int(share * sum(layer.attention for layer in self._of_layers)))
        left, checkpointed = free - attention_bytes, len(self._of_layers)
        for layer in reversed(self._of_layers):
            left -= int(share * (layer.everything - layer.attention))
            if left < 0:
                break
            checkpointed -= 1
        return KeptActivations(
            attention_bytes, checkpointed=checkpointed if checkpointed < len(self._of_layers) else None
        )

    def most_tokens(self, parameters: Iterable[nn.Parameter]) -> int:
        """Tokens for which a forward stays within the budget though its layers keep everything; 0 where unknown."""
        if not self._of_layers:
            return 0
        stays = self.memory.allocated - sum(map(_bytes_of_gradient, parameters))
        needed = max(self._in_all, self._at_start + sum(layer.everything for layer in self._of_layers))
        return max(0, int((self.limit - stays) / max(1, needed) * self._tokens))

    def learn(self) -> None:
        """Look at what the last forward and its backward took, which has just ended. The most of all counts."""
        if self._open is None:
            return
        (measured, tokens, allocated, stays), self._open = self._open, None
        if not measured.found:
            return
        peak = self.memory.peak
        # Gradients that were there before grow no more, so that the peak was at the start
        at_start = (peak if allocated > stays else measured.peak) - allocated
        if tokens > self._tokens:
            self._at_start = self._in_all = 0
            self._tokens, self._of_layers = tokens, measured.of_layers
        self._at_start, self._in_all = max(self._at_start, at_start), max(self._in_all, peak - stays)

    def plan_forward(self, trainer: GRPOTrainer, model: nn.Module, tokens: int) -> KeptActivations:
        """
        [`plan`] for the next forward of a trainer's model: what fits into the memory of every process. Tokens are
        counted as in [`tokens_of_forward`].
        """
        plan = self.plan(trainer.state.global_step, tokens, model.parameters())
        if trainer.accelerator.num_processes == 1:
            return plan
        all_layers = sys.maxsize
        checkpointed = all_layers if plan.checkpointed is None else plan.checkpointed
        each = of_all_processes(trainer.accelerator, "memory of layers", [plan.attention_bytes, checkpointed])
        (attention_bytes, _), (_, checkpointed) = each.amin(0).tolist(), each.amax(0).tolist()
        plan.attention_bytes, plan.checkpointed = attention_bytes, None if checkpointed == all_layers else checkpointed
        return plan


def kept_in_forward(
    engine: Any, logps_request: LogpsRequest, call: LogpsArgs, is_multimodal: bool
) -> KeptActivations | None:
    """What the layers of a forward keep, `None` without gradients; arguments are those of [`LogpsEngine.compute`]."""
    if not torch.is_grad_enabled():
        return None
    if engine.memory is None:
        return kept_as_trl(engine, logps_request, call)
    layout = engine.layout(call.model, is_multimodal, logps_request.reads_padding)
    tokens = tokens_of_forward(engine, logps_request, call, layout)
    return engine.memory.plan_forward(engine.trainer, engine.unwrapped(call.model), tokens)


def kept_as_trl(engine: Any, logps_request: LogpsRequest, call: LogpsArgs) -> KeptActivations | None:
    """
    What the layers of a forward with gradients keep without `fused_memory`: of attention, what fits into the memory in
    which checkpointing would keep the padding of TRL's rows, and in the first forward of a window into that of the
    gradients. `None` where that is not known.
    """
    is_whole = call.batch_size is None or call.batch_size >= len(call.input_ids)
    if call.multimodal or not is_whole:  # layers of other parts, or of several runs, are checkpointed too
        return None
    padded = (logps_request.micro_batch or len(call.input_ids)) * call.input_ids.shape[1]
    trainer, causal_lm = engine.trainer, engine.causal_lm(call.model)
    # Not in the backward of a part, where memory ran out
    if not logps_request.begins_window or why_memory_is_taken(trainer, causal_lm) is not None:
        return KeptActivations(padded_tokens=padded)
    layout = engine.layout(call.model, False, logps_request.reads_padding)
    gradients = gradient_memory(trainer, causal_lm, layout)
    layers = len(layers_of(text_model(causal_lm)))
    return KeptActivations(padded_tokens=padded, last=LastLayers(layers, partial(gradients.left, padded=padded)))


def _bytes_of_gradient(parameter: nn.Parameter) -> int:
    return 0 if parameter.grad is None else torch_compat.local_bytes(parameter.grad)


def why_no_memory_budget(trainer: GRPOTrainer) -> str | None:
    """Why `fused_memory` cannot act, or `None`."""
    args: Any = trainer.args
    if trainer.accelerator.device.type != "cuda":
        return f"the model is on {trainer.accelerator.device.type}, whose memory is not measured"
    if not args.gradient_checkpointing:
        return "gradient_checkpointing is off: layers keep everything"
    if (args.gradient_checkpointing_kwargs or {"use_reentrant": False}) != {"use_reentrant": False}:
        return "gradient_checkpointing_kwargs asks for torch's own checkpointing"
    return None


def memory_budget(trainer: GRPOTrainer, fraction: float | None) -> MemoryBudget | None:
    """The budget that `fused_memory` asks for, or `None` where memory stays at that of TRL's padded micro-batch."""
    if fraction is None or why_no_memory_budget(trainer) is not None:
        return None
    return MemoryBudget(fraction, DeviceMemory(trainer.accelerator.device))


def token_limits(engine: Any, layout: LayoutName, has_images: bool) -> Callable[[int], TokenLimits]:
    """
    The most tokens of shared forwards, the same on all processes, given those of a micro-batch in TRL's padding:
    without `fused_memory`, what takes no more memory than TRL does.

    Args:
        engine ([`LogpsEngine`]): of the trainer whose micro-batches share forwards.
        layout (`str`): of their rows.
        has_images (`bool`): whether a micro-batch of any process has images.
    """
    trainer, most = engine.trainer, engine.options.fused_max_tokens_per_forward
    if most is not None:
        return lambda padded: TokenLimits(most, most)
    gradients = GradientMemory()
    if engine.memory is None and not has_images:  # what a vision tower takes for an image is not known
        gradients = gradient_memory(trainer, engine.causal_lm(trainer.model), layout)
    gradients = replace(
        gradients, free=int(of_all_processes(trainer.accelerator, "free memory", [gradients.free]).amin())
    )

    def limits(padded: int) -> TokenLimits:
        others, more = min(padded, MAX_TOKENS), gradients.tokens(padded)
        return TokenLimits(min(padded + more, MOST_OF_FIRST) if more else others, others)

    return limits


def limits_in_budget(limits: TokenLimits, engine: Any) -> TokenLimits:
    """The limits of shared forwards, more where `fused_memory` has room, which may differ from process to process."""
    if engine.memory is None or engine.options.fused_max_tokens_per_forward is not None:
        return limits
    most = engine.memory.most_tokens(engine.trainer.model.parameters())
    return TokenLimits(max(limits.first, most), max(limits.others, most))


def free_memory() -> None:
    """Give back to the device what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
