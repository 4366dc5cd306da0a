"""
The tokens of shared forwards: in the memory that TRL's padding and gradients would take, or in that of `fused_memory`.

The first forward of an accumulation window finds no gradients. TRL's padded micro-batches behind its first one have
those of all weights beside them. In the same memory it may have more tokens. So may the others where micro-batches are
small: TRL's forward keeps casts of all weights until it ends, and compiled layers keep none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat.architecture import text_model
from trl_fused_grpo._utils import of_all_processes
from trl_fused_grpo.modeling.layers.memo import LayerMemo, layers_of
from trl_fused_grpo.modeling.layers.unpacked import unpacked_layers
from trl_fused_grpo.ops.chunk_size import default_group_mib


logger = logging.get_logger(__name__)

GIB = 2**30
# More tokens at once were not measured
MOST_TOKENS = 32_768
# The optimizer's states exist after the first step, and the second one shows what a step takes
LEARNED_AT_STEP = 2
# A forward of so many times the tokens of those before shows anew what it takes
MOST_GROWTH = 1.1
# Of the budget: the allocator cannot use every gap
USABLE = 0.95
# What a layer takes while it is computed again and its backward runs, for each byte of the inputs and outputs of its
# products. Where float32 weights are cast for them, Qwen3 takes 1.7 compiled and 3.1 to 3.5 as in TRL's forward
_COMPILED, _AS_IT_IS, _OF_TRL = 1.75, 3.5, 2.5
_WITHOUT_CASTS = 2.0
# Hidden states of a token at the head: four in the norm before it, those that it takes, and their gradients
_STATES_AT_HEAD = 6


class MemoryBudget:
    """
    How many tokens a forward may have in a share of the device's memory. The forwards of the first two optimizer steps
    show what they take, and so does each one of many more tokens than those before.
    """

    def __init__(self, fraction: float, device: torch.device):
        self._device = device
        self.limit = int(fraction * torch.cuda.get_device_properties(device).total_memory * USABLE)
        self._open: tuple[int, int] | None = None  # tokens of a forward, and what was allocated that is no gradient
        self._tokens = 1  # of the largest forward so far
        self._taken = 0  # by it until the end of its backward, gradients included

    def begin(self, step: int, tokens: int, parameters: Iterable[nn.Parameter]) -> None:
        """Look at the next forward with gradients."""
        if step < LEARNED_AT_STEP or tokens > MOST_GROWTH * self._tokens:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._open = tokens, self._stays(parameters)

    def learn(self) -> None:
        """Look at what the last forward and its backward took, which has just ended. The most of all counts."""
        if self._open is None:
            return
        (tokens, stays), self._open = self._open, None
        if tokens > self._tokens:
            self._tokens, self._taken = tokens, 0
        self._taken = max(self._taken, torch.cuda.max_memory_allocated(self._device) - stays)

    def most_tokens(self, parameters: Iterable[nn.Parameter]) -> int:
        """Tokens for which a forward stays within the budget; 0 where unknown."""
        if not self._taken:
            return 0
        left = self.limit - self._stays(parameters)
        if left < self._taken:
            logger.warning_once(
                f"fused_memory has no effect: {self.limit / GIB:.1f} GiB are less than the training takes without it, "
                f"{(self.limit - left + self._taken) / GIB:.1f} GiB."
            )
        return max(0, left * self._tokens // self._taken)

    def _stays(self, parameters: Iterable[nn.Parameter]) -> int:
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        return torch.cuda.memory_allocated(self._device) - sum(map(torch_compat.local_bytes, gradients))


@dataclass(frozen=True)
class GradientMemory:
    """The memory of gradients that are not there yet, and what a forward takes of it, in bytes."""

    free: int = 0  # of all gradients on this process
    inputs: int = 0  # what checkpointed layers keep of a token until backward comes to them
    working: int = 1  # what a layer takes for a token while it is computed again
    working_of_trl: int = 1  # the same in TRL's forward
    casts_of_trl: int = 0  # what TRL's forward takes for casts of weights when it ends, and no layer is computed
    casts: int = 0  # what they take here, most at once
    working_of_head: int = 1  # what the norm before the head, and the head, take for a token

    def tokens(self, padded: int) -> tuple[int, int]:
        """
        How many tokens the first forward may have where TRL's has `padded`, and those behind it. There is room for them
        when backward begins, and still when it ends: then no inputs are kept, and the gradients are there.
        """
        of_trl = padded * self.inputs + max(padded * self.working_of_trl, self.casts_of_trl)
        first = min((self.free + of_trl) // (self.inputs + self.working), of_trl // self.working)
        return first, (of_trl - self.casts) // (self.inputs + max(self.working, self.working_of_head))


def gradient_memory(trainer: Any, causal_lm: PreTrainedModel, compiled: bool) -> GradientMemory:
    """The memory of the gradients of a trainer's policy, if the first forward of an accumulation window may take it."""
    if why_not_in_memory_of_gradients(trainer, causal_lm) is not None:
        return GradientMemory()
    text, device = text_model(causal_lm), trainer.accelerator.device.type
    hidden_size = causal_lm.config.get_text_config().hidden_size
    embedding: Any = causal_lm.get_input_embeddings()
    output = [*filter(None, [causal_lm.get_output_embeddings()])]
    # Not those of a vision tower: without images it gets none
    weights = {parameter for part in (text, *output) for parameter in torch_compat.parameters_of(part)}
    trained = [weight for weight in weights if weight.requires_grad and weight.device.type == device]
    free = sum(map(torch_compat.local_bytes, trained))
    size = embedding.weight.element_size()
    is_mixed = trainer.accelerator.mixed_precision in ("bf16", "fp16")
    products = _width_of_products(causal_lm) * (2 if is_mixed else size)
    working, of_trl, casts_of_trl, casts = _WITHOUT_CASTS, _WITHOUT_CASTS, 0, 0
    if is_mixed and size == 4 and not trainer.is_fsdp_enabled:  # FSDP casts weights as it gathers them
        working = of_trl = _AS_IT_IS
        if len(trained) == len(weights):  # autocast keeps the casts of trained weights, not of frozen ones
            working, of_trl = (_COMPILED, _OF_TRL) if compiled else (working, of_trl)
            head = {parameter for part in output for parameter in torch_compat.parameters_of(part)}
            of_head = sum(map(torch_compat.local_bytes, head))
            of_layers = free - sum(map(torch_compat.local_bytes, {embedding.weight, *head}))
            # The gradient of the head is there when backward begins, no cast of it
            casts_of_trl, casts = (of_layers - of_head) // 2, (of_head if compiled else of_layers) // 2
    return GradientMemory(
        free=free,
        inputs=len(layers_of(text)) * hidden_size * size,
        working=int(working * products),
        working_of_trl=int(of_trl * products),
        casts_of_trl=casts_of_trl,
        casts=casts,
        working_of_head=_STATES_AT_HEAD * hidden_size * size + int(default_group_mib(hidden_size, 1) * 2**20),
    )


def why_memory_is_taken(trainer: Any, causal_lm: PreTrainedModel) -> str | None:
    """Why the memory of gradients is not free when a window begins, or `None`: what the user changes in a training."""
    layers: list[Any] = layers_of(text_model(causal_lm))
    if not all(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        return "a layer does not checkpoint any more"
    if any(weight.grad is not None for weight in torch_compat.parameters_of(trainer.model)):
        return "weights still have gradients when a window begins"
    return None


def why_not_in_memory_of_gradients(trainer: Any, causal_lm: PreTrainedModel) -> str | None:
    """Why the first forward of a window may not take the memory of gradients that are not there yet, or `None`."""
    if trainer.args.gradient_accumulation_steps == 1:
        return "TRL has no micro-batch that finds gradients"
    kwargs = trainer.args.gradient_checkpointing_kwargs or {}
    if not trainer.args.gradient_checkpointing or kwargs.keys() - {"use_reentrant"}:
        return "its layers do not checkpoint as TRL's default does"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps gradients in memory of its own"
    wrapped = torch_compat.without_compiler(trainer.model_wrapped)
    if isinstance(wrapped, DistributedDataParallel) and wrapped.gradient_as_bucket_view:
        return "gradients stay where DDP reduces them"
    unpacked = unpacked_layers(causal_lm)
    if unpacked.with_state or unpacked.attention:
        return "some of its layers run on rows of their own"
    config = causal_lm.config.get_text_config()
    if model_compat.attention_implementation(config) == "eager":
        return "its attention may keep a number for each pair of tokens"
    embedding = getattr(causal_lm.get_input_embeddings(), "weight", None)
    if not _width_of_products(causal_lm) or embedding is None or not hasattr(config, "hidden_size"):
        return "what its layers take is not known"
    return None


@LayerMemo
def _width_of_products(causal_lm: PreTrainedModel) -> int:
    """Inputs and outputs of all matrices of the widest layer, 0 where they are not known."""
    layers = layers_of(text_model(causal_lm))
    if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        return 0
    if any(buffer.dim() > 1 for layer in layers for buffer in layer.buffers()):
        return 0  # matrices of quantized layers, among others
    return max(map(_width_of_matrices, layers), default=0)


def _width_of_matrices(layer: nn.Module) -> int:
    shapes = [parameter.shape for parameter in layer.parameters() if parameter.dim() > 1]
    return sum(shape[-1] + shape.numel() // shape[-1] for shape in shapes)


def why_no_memory_budget(trainer: GRPOTrainer) -> str | None:
    """Why `fused_memory` cannot act, or `None`."""
    device_type = trainer.accelerator.device.type
    return None if device_type == "cuda" else f"the model is on {device_type}, whose memory is not measured"


def memory_budget(trainer: GRPOTrainer, fraction: float | None) -> MemoryBudget | None:
    """The budget that `fused_memory` asks for, or `None` where memory stays at that of TRL's padded micro-batch."""
    if fraction is None or why_no_memory_budget(trainer) is not None:
        return None
    return MemoryBudget(fraction, trainer.accelerator.device)


def token_limits(engine: Any, has_images: bool, padded: int) -> tuple[int, int]:
    """
    The most tokens of the first shared forward of an accumulation window, and of those behind it: without
    `fused_memory`, what takes no more memory than TRL does. With it they may differ from process to process.
    """
    trainer, most = engine.trainer, engine.options.fused_max_tokens_per_forward
    if most is not None:
        return most, most
    gradients = GradientMemory()
    if engine.memory is None and not has_images:  # what a vision tower takes for an image is not known
        layers, _ = engine.layers_to_compile(engine.unwrapped(trainer.model))
        gradients = gradient_memory(trainer, engine.causal_lm(trainer.model), bool(layers))
    free = int(of_all_processes(trainer.accelerator, "free memory", [gradients.free]).amin())
    first, behind = (max(padded, tokens) for tokens in replace(gradients, free=free).tokens(padded))
    in_budget = 0 if engine.memory is None else engine.memory.most_tokens(trainer.model.parameters())
    return max(min(first, MOST_TOKENS), in_budget), max(min(behind, MOST_TOKENS), in_budget)
