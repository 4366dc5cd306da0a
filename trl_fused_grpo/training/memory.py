"""
`fused_memory`: how much of the device's memory a training may take, and what it takes for it: larger shared forwards,
and layers that keep for backward what they would compute again.
"""

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.kept_activations import KeptActivations, LayerBytes

from .agreement import of_all_processes


logger = logging.get_logger(__name__)

GIB = 2**30
# More tokens at once gain little on one H200 (`benchmarks/NOTES.md`)
MAX_TOKENS = 16_384
# The optimizer's states exist after the first step, and the second one shows what a step takes
LEARNED_AT_STEP = 2
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
    Decides what the layers of a forward keep. In the first two optimizer steps it only learns what a step takes with
    every layer checkpointed.

    Args:
        fraction (`float`): of the device's memory that may be taken.
        memory ([`DeviceMemory`]): the device's.
    """

    def __init__(self, fraction: float, memory: DeviceMemory):
        self.memory = memory
        self.limit = int(fraction * memory.total * USABLE)
        self._open: tuple[KeptActivations, int, int] | None = None  # a forward, its tokens, what stays allocated
        self._layers, self._layer = 0, LayerBytes(0, 0)
        self._tokens = 1  # of the forward that all of these are of
        # What a forward and its backward take beyond what stays, gradients included
        self._weight_gradients, self._needed = 0, 0

    def plan(self, step: int, tokens: int, parameters: Iterable[nn.Parameter]) -> KeptActivations:
        """
        What the layers keep in the next forward with gradients.

        Args:
            step (`int`): optimizer steps so far.
            tokens (`int`): of the forward.
            parameters (`Iterable[nn.Parameter]`): of the model.
        """
        parameters = list(parameters)
        stays = self.memory.allocated - sum(map(_bytes_of_gradient, parameters))
        if step < LEARNED_AT_STEP:
            self._weight_gradients = sum(torch_compat.local_bytes(p) for p in parameters if p.requires_grad)
            self.memory.forget_peak()
            kept = KeptActivations(inputs=parameters)
            self._open = (kept, tokens, stays)
            return kept
        free = self.limit - stays - self.needed_for(tokens)
        if free < 0:
            logger.warning_once(
                f"fused_memory has no effect: {self.limit / GIB:.1f} GiB are less than the training takes with every "
                f"layer checkpointed, {(self.limit - free) / GIB:.1f} GiB."
            )
        everything, attention = (int(count * tokens / self._tokens) for count in self._layer)
        keeps_attention = 0 < attention * self._layers <= free
        if keeps_attention:
            free -= attention * self._layers
            everything -= attention
        whole = min(self._layers, max(0, free) // max(1, everything)) if self._layers else 0
        return KeptActivations(keeps_attention, self._layers - whole if whole else None)

    def needed_for(self, tokens: int) -> int:
        """Bytes that a step takes beyond what stays, with every layer checkpointed, for forwards of so many tokens."""
        activations = max(0, self._needed - self._weight_gradients)
        return self._weight_gradients + int(activations * max(1.0, tokens / self._tokens))

    def most_tokens(self, parameters: Iterable[nn.Parameter]) -> int:
        """Tokens for which a forward with every layer checkpointed stays within the budget; 0 before a backward."""
        activations = self._needed - self._weight_gradients
        if activations <= 0 or not self._layers:
            return 0
        stays = self.memory.allocated - sum(map(_bytes_of_gradient, parameters))
        return max(0, int((self.limit - stays - self._weight_gradients) / activations * self._tokens))

    def learn(self) -> None:
        """Look at what the last forward and its backward took, which has just ended. The most of all counts."""
        if self._open is None:
            return
        (kept, tokens, stays), self._open = self._open, None
        needed = self.memory.peak - stays
        if kept.of_layer is not None and needed > self._needed:
            self._layers, self._layer, self._tokens = kept.layers, kept.of_layer, tokens
            self._needed = needed

    def plan_forward(self, trainer: GRPOTrainer, model: nn.Module, tokens: int) -> KeptActivations:
        """[`plan`] for the next forward of a trainer's model: what fits into the memory of every process."""
        plan = self.plan(trainer.state.global_step, tokens, model.parameters())
        if trainer.accelerator.num_processes == 1:
            return plan
        all_layers = sys.maxsize
        checkpointed = all_layers if plan.checkpointed is None else plan.checkpointed
        each = of_all_processes(trainer.accelerator, [int(plan.attention), checkpointed])
        (attention, _), (_, checkpointed) = each.amin(0).tolist(), each.amax(0).tolist()
        plan.attention, plan.checkpointed = bool(attention), None if checkpointed == all_layers else checkpointed
        return plan


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


def token_budget(batches: list[dict[str, Any]], budget: MemoryBudget | None, model: nn.Module) -> int:
    """
    Tokens that a shared forward may have by default: those of TRL's padded micro-batch, at most [`MAX_TOKENS`]; more
    where `fused_memory` has room for them.
    """
    prompt_ids, completion_ids = batches[0]["prompt_ids"], batches[0]["completion_ids"]
    tokens = tokens_as_trl(prompt_ids.numel() + completion_ids.numel())
    return tokens if budget is None else max(tokens, budget.most_tokens(model.parameters()))


def tokens_as_trl(padded: int) -> int:
    """Tokens that a shared forward may have in the memory of a micro-batch with `padded` tokens in TRL's padding."""
    return min(padded, MAX_TOKENS)


def free_memory() -> None:
    """Give back to the device what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
