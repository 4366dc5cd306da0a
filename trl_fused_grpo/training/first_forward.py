"""
The first forward of an accumulation window finds no gradients. TRL's padded micro-batches behind its first one have
those of all weights beside them. In the same memory it may have more tokens, and keep more of what attention computed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat.architecture import text_model
from trl_fused_grpo.modeling.layer_memo import LayerMemo, layers_of
from trl_fused_grpo.modeling.unpacked_layers import unpacked_layers


# More tokens at once gain nothing on one H200 (`benchmarks/NOTES.md`)
MAX_TOKENS = 32_768
# While a layer is computed again and its backward runs there are so many numbers for each in the inputs and outputs of
# its products: 1.50 to 1.55 were found for Qwen3 of 0.6B, 1.7B and 4B
_NUMBERS_OF_PRODUCTS = 1.6


@dataclass(frozen=True)
class GradientMemory:
    """
    The memory of the gradients that are not there yet.

    Args:
        free (`int`): its bytes on this process.
        bytes_of_token (`int`):
            What each token of a forward takes when backward begins: the inputs of checkpointed layers, and what one
            layer takes while it is computed again.
    """

    free: int = 0
    bytes_of_token: int = 1

    @property
    def tokens(self) -> int:
        """Tokens for which there is room in it."""
        return self.free // self.bytes_of_token

    def beside(self, tokens: int, padded: int) -> int:
        """Bytes that a forward leaves of it, given its tokens and those of a micro-batch in TRL's padding."""
        return max(0, self.free - max(0, tokens - padded) * self.bytes_of_token)


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
    The memory of the gradients that a trainer's policy does not have yet, if a forward may take it.

    Args:
        trainer (`GRPOTrainer`): that may be about to begin an accumulation window.
        causal_lm (`PreTrainedModel`): its policy, in no wrapper.
        layout (`str`): of the policy's rows.
    """
    layers: list[Any] = layers_of(text_model(causal_lm))
    reason = why_not_in_memory_of_gradients(trainer, causal_lm, layout)
    if reason is not None or not all(layer.gradient_checkpointing for layer in layers):
        return GradientMemory()
    device = trainer.accelerator.device
    parameters = torch_compat.parameters_of(trainer.model)
    waiting = [p for p in parameters if p.requires_grad and p.grad is None and p.device.type == device.type]
    embedding: Any = causal_lm.get_input_embeddings()
    size = embedding.weight.element_size()
    size_of_products = 2 if trainer.accelerator.mixed_precision in ("bf16", "fp16") else size
    inputs = len(layers) * causal_lm.config.get_text_config().hidden_size * size
    working = int(_NUMBERS_OF_PRODUCTS * _width_of_products(causal_lm) * size_of_products)
    return GradientMemory(sum(map(torch_compat.local_bytes, waiting)), inputs + working)


def why_not_in_memory_of_gradients(trainer: Any, causal_lm: PreTrainedModel, layout: str) -> str | None:
    """Why a forward may not take the memory of gradients that are not there yet, or `None`."""
    if trainer.args.gradient_accumulation_steps == 1:
        return "TRL has no micro-batch that finds gradients"
    kwargs = trainer.args.gradient_checkpointing_kwargs or {}
    if not trainer.args.gradient_checkpointing or kwargs.keys() - {"use_reentrant"}:
        return "its layers do not checkpoint as TRL's default does"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps gradients in memory of its own"
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, DistributedDataParallel) and wrapped.gradient_as_bucket_view:
        return "gradients stay where DDP reduces them"
    if layout != "packed":
        return "rows are not packed"
    unpacked = unpacked_layers(causal_lm)
    if unpacked.with_state or unpacked.attention:
        return "some of its layers run on rows of their own"
    if model_compat.attention_implementation(causal_lm.config.get_text_config()) == "eager":
        return "its attention may keep a number for each pair of tokens"
    checkpoints = [hasattr(layer, "gradient_checkpointing") for layer in layers_of(text_model(causal_lm))]
    if not all(checkpoints) or not _width_of_products(causal_lm):
        return "what its layers take is not known"
    return None


@LayerMemo
def _width_of_products(causal_lm: PreTrainedModel) -> int:
    """Inputs and outputs of all matrices of the widest layer, 0 where none has any."""
    shapes = [[p.shape for p in layer.parameters() if p.dim() > 1] for layer in layers_of(text_model(causal_lm))]
    return max((sum(shape[-1] + shape.numel() // shape[-1] for shape in of_layer) for of_layer in shapes), default=0)
