"""The output projection of a causal language model, as the fused function needs it."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class LMHead:
    """
    A linear head and what the model does to its output before the softmax.

    Args:
        weight (`Tensor`):
            Shape `[V, H]`.
        bias (`Tensor`, *optional*):
            Shape `[V]`.
        logit_scale (`float`, *optional*, defaults to `1.0`):
            Multiplier of the logits (Cohere, Falcon-H1; Granite divides, so its scale is the inverse).
        softcap (`float`, *optional*):
            `softcap * tanh(logits / softcap)`, after the scale (Gemma 2).
        fp32 (`bool`, *optional*, defaults to `False`):
            Whether the projection stays in the weight's dtype under autocast (`cast_lm_head_to_fp32`).
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    fp32: bool = False

    @classmethod
    def of(cls, causal_lm: PreTrainedModel, fp32: bool = False) -> "LMHead":
        """
        Read the head of a causal language model, as it is at this moment: wrappers replace it.

        Raises:
            `ValueError`: when the model has no output projection, or one that is not a plain linear layer.
        """
        module = output_projection(causal_lm)
        text_config = causal_lm.config.get_text_config()
        return cls(
            weight=module.weight,
            bias=getattr(module, "bias", None),
            logit_scale=_logit_scale(text_config),
            softcap=getattr(text_config, "final_logit_softcapping", None),
            fp32=fp32,
        )


def output_projection(causal_lm: PreTrainedModel) -> nn.Module:
    """
    Return the module that maps hidden states to logits.

    Raises:
        `ValueError`: when there is none, or when it is not a plain linear layer. The message says what to change.
    """
    module = causal_lm.get_output_embeddings()
    name = type(causal_lm).__name__
    advice = "train with use_liger_loss=False"
    if module is None:
        raise ValueError(
            f"{name} has no output projection (get_output_embeddings() is None), so there is nothing to "
            f"fuse: pass a model with a language-modeling head, or {advice}."
        )
    if hasattr(module, "lora_A"):
        raise ValueError(
            f"the output projection of {name} carries a PEFT adapter, which is not supported: remove "
            f"'lm_head' from target_modules, or {advice}."
        )
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"the output projection of {name} ({type(module).__name__}) has no floating-point weight in "
            f"memory: leave it out of quantization and offloading, or {advice}."
        )
    # Between forwards FSDP2 keeps its shards in DTensors too
    if isinstance(weight, DTensor) and not any(isinstance(m, FSDPModule) for m in causal_lm.modules()):
        raise ValueError(
            f"the output projection of {name} is sharded by tensor parallelism, which is not supported: "
            f"leave it out of the plan, or {advice}."
        )
    return module


def _logit_scale(text_config) -> float:
    """Multiplier of the raw logits under the names that model families give it; a real 0.0 is kept."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text_config, name, None) is not None:
            return getattr(text_config, name)
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    return scaling if text_config.model_type == "hyperclovax" else 1 / scaling
