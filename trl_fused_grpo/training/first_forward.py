"""
The first forward of an accumulation window finds no gradients. TRL's padded micro-batches behind its first one have
those of all weights beside them. In the same memory it may have more tokens, and keep more of what attention computed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat.architecture import text_model
from trl_fused_grpo.modeling.layer_memo import LayerMemo, layers_as_they_are, layers_of
from trl_fused_grpo.modeling.unpacked_layers import unpacked_layers


# More tokens at once were not measured
MOST_OF_FIRST = 32_768
# While a layer is computed again and its backward runs there are at most so many numbers for each in the inputs and
# outputs of its products: 1.5 to 1.6 in Qwen3 of 0.6B to 4B with kernels, up to 1.9 in other families without
_NUMBERS_OF_PRODUCTS = 2.0


@dataclass(frozen=True)
class GradientMemory:
    """
    The memory of gradients that are not there yet, and what a forward takes of it, in bytes.

    Args:
        free (`int`): of all gradients on this process.
        inputs (`int`): what checkpointed layers keep of a token until backward comes to them.
        working (`int`): what a layer takes for a token while it is computed again.
    """

    free: int = 0
    inputs: int = 0
    working: int = 1

    @property
    def most_tokens(self) -> int:
        """How many more tokens than in TRL's padding a forward may have at the most."""
        return self.free // (self.inputs + self.working)

    def tokens(self, padded: int) -> int:
        """
        How many more tokens than a micro-batch in TRL's padding a forward may have. There is room for them when
        backward begins, and still when it ends: then no inputs are kept, and the gradients are there.
        """
        return min(self.most_tokens, padded * self.inputs // self.working)

    def left(self, tokens: int, padded: int) -> int:
        """Bytes that a forward leaves when backward begins, given its tokens and those in TRL's padding."""
        return max(0, self.free - max(0, tokens - padded) * (self.inputs + self.working))


class TokenLimits(NamedTuple):
    """
    The most tokens of forwards that micro-batches share.

    Args:
        first (`int`): of the first one of an accumulation window.
        others (`int`): of those behind it.
    """

    first: int
    others: int


def gradient_memory(trainer: Any, causal_lm: PreTrainedModel, layout: str) -> GradientMemory:
    """
    The memory of the gradients of a trainer's policy, if the first forward of an accumulation window may take it.

    Args:
        trainer (`GRPOTrainer`): whose policy it is.
        causal_lm (`PreTrainedModel`): the policy, in no wrapper.
        layout (`str`): of the policy's rows.
    """
    with layers_as_they_are():
        if why_not_in_memory_of_gradients(trainer, causal_lm, layout) is not None:
            return GradientMemory()
        width = _width_of_products(causal_lm)
    text, device = text_model(causal_lm), trainer.accelerator.device.type
    # Not those of a vision tower: without images it gets none
    parts = [text, *filter(None, [causal_lm.get_output_embeddings()])]
    weights = {parameter for part in parts for parameter in torch_compat.parameters_of(part)}
    trained = [weight for weight in weights if weight.requires_grad and weight.device.type == device]
    embedding: Any = causal_lm.get_input_embeddings()
    size = embedding.weight.element_size()
    size_of_products = 2 if trainer.accelerator.mixed_precision in ("bf16", "fp16") else size
    return GradientMemory(
        free=sum(map(torch_compat.local_bytes, trained)),
        inputs=len(layers_of(text)) * causal_lm.config.get_text_config().hidden_size * size,
        working=int(_NUMBERS_OF_PRODUCTS * width * size_of_products),
    )


def why_memory_is_taken(trainer: Any, causal_lm: PreTrainedModel) -> str | None:
    """Why the memory of gradients is not free when a window begins, or `None`: what the user changes in a training."""
    layers: list[Any] = layers_of(text_model(causal_lm))
    if not all(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        return "a layer does not checkpoint any more"
    if any(weight.grad is not None for weight in torch_compat.parameters_of(trainer.model)):
        return "weights still have gradients when a window begins"
    return None


def why_not_in_memory_of_gradients(trainer: Any, causal_lm: PreTrainedModel, layout: str) -> str | None:
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
    if layout != "packed":
        return "rows are not packed"
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
