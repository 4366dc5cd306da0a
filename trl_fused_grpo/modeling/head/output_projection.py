"""The output projection of a causal language model: found, checked, and read as an [`LMHead`]; and what it gets."""

import inspect
import re
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.ops.lm_head import LMHead, LowRank


_ADVICE = "train with use_liger_loss=False"


class LogitScaling(NamedTuple):
    """The scale of a model's raw logits, and the softcap behind it, if there is one."""

    scale: float
    softcap: float | None


def read_lm_head(model: nn.Module, fp32: bool = False, scaling: LogitScaling | None = None) -> LMHead:
    """
    Read the head of a causal language model, as it is at this moment: wrappers replace it. [`read_hidden_states`] has
    an example.

    Args:
        model (`nn.Module`): bare, or in wrappers of PEFT, DDP or DeepSpeed that keep its weights whole.
        fp32 (`bool`, *optional*, defaults to `False`): see [`LMHead`].
        scaling ([`LogitScaling`], *optional*): of its logits. By default what its configuration says now.

    Raises:
        `ValueError`: when the model has no output projection, or one that is not a plain linear layer.
    """
    causal_lm = model_compat.causal_lm_of(model)
    module: Any = output_projection(causal_lm)
    scale, softcap = logit_scaling(causal_lm) if scaling is None else scaling
    low_rank, bias = _lora(module, getattr(module, "bias", None))
    return LMHead(module.weight, bias, logit_scale=scale, softcap=softcap, fp32=fp32, low_rank=low_rank)


def read_hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """
    Hidden states `[B, L, H]` as a causal language model's head gets them, each of which predicts the token after it.

    The model runs as it is called, in its wrappers, so that DDP reduces the gradients of what is computed from them,
    and autocast, hooks, adapters and vision towers do what they do. Its head runs for one position of each row.

    ```python
    import torch
    from transformers import AutoModelForCausalLM
    from trl_fused_grpo import fused_linear_logps, read_hidden_states, read_lm_head

    causal_lm, ids = AutoModelForCausalLM.from_pretrained(model), torch.tensor([5, 6, 7])
    hidden = read_hidden_states(causal_lm, input_ids=ids[None])
    logps, entropies = fused_linear_logps(hidden[0, :-1], read_lm_head(causal_lm), ids[1:])
    ```

    Args:
        model (`nn.Module`): bare, or in wrappers of PEFT, DDP or DeepSpeed.
        inputs: keyword arguments of its forward, such as `input_ids`, `attention_mask` and `pixel_values`.

    Raises:
        `ValueError`: when the model does not call its head, as a compiled one.
    """
    hidden: list[Tensor] = []

    def keep(head: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        hidden.append(args[0])
        return args[0][:, :1]

    with model_compat.causal_lm_of(model).get_output_embeddings().register_forward_pre_hook(keep):
        model(**{"use_cache": False, **inputs})
    if not hidden:
        raise ValueError(f"{type(model).__name__} did not call its output projection, as a compiled model does not.")
    return hidden[0]


def output_projection(causal_lm: PreTrainedModel) -> nn.Module:
    """Return the module that maps hidden states to logits: a linear layer, or LoRA's around one."""
    module = causal_lm.get_output_embeddings()
    name = type(causal_lm).__name__
    if module is None:
        raise ValueError(
            f"{name} has no output projection (get_output_embeddings() is None), so there is nothing to fuse: pass a "
            f"model with a language-modeling head, or {_ADVICE}."
        )
    module = _saved_module(module)
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"the output projection of {name} ({type(module).__name__}) has no floating-point weight in memory: leave "
            f"it out of quantization and offloading, or {_ADVICE}."
        )
    # Between forwards FSDP2 keeps its shards in DTensors too
    if isinstance(weight, DTensor) and not any(map(torch_compat.is_fsdp2, causal_lm.modules())):
        raise ValueError(
            f"the output projection of {name} is sharded by tensor parallelism, which is not supported: leave it out "
            f"of the plan, or {_ADVICE}."
        )
    reason = _why_not_lora(module)
    if reason is not None:
        raise ValueError(
            f"the output projection of {name} carries an adapter that is not plain LoRA ({reason}), so that its logits "
            f"are not those of a weight and a low-rank term: use plain LoRA, leave the head out of the adapter, or "
            f"{_ADVICE}."
        )
    return module


def layer_before_head(causal_lm: PreTrainedModel) -> str | None:
    """
    The name of a layer that a model runs between its backbone and its output projection, as BERT's relatives do, or
    `None`. Found by its parameters, which are neither's.
    """
    head, backbone = causal_lm.get_output_embeddings(), architecture.backbone(causal_lm)
    if any(child is head for child in causal_lm.children()):  # nearly always, and without a walk over all modules
        others = {name: child for name, child in causal_lm.named_children() if child not in (head, backbone)}
        return next((name for name, child in others.items() if next(child.parameters(), None) is not None), None)
    name = next((name for name, module in causal_lm.named_modules() if module is head), "")
    beside: Any = causal_lm.get_submodule(name.rpartition(".")[0])
    if beside is causal_lm:
        return None
    known = {
        id(weight) for part in (backbone, architecture.text_model(causal_lm), head) for weight in part.parameters()
    }
    unknown = (part for part, parameter in beside.named_parameters() if id(parameter) not in known)
    # A bias of its own may be the projection's
    layer = next((part.rpartition(".")[0] for part in unknown if "." in part), None)
    return None if layer is None else f"{name.rpartition('.')[0]}.{layer}"


def _saved_module(module: Any) -> nn.Module:
    """The module that runs inside PEFT's wrapper for `modules_to_save`: the active adapter's copy, or the original."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    active = [name for name in module.active_adapters if name in copies]
    return module.original_module if module.disable_adapters or not active else copies[active[0]]


def head_parameter_modules(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """
    The modules that an [`output_projection`] runs through, the outermost first: PEFT's wrapper, and the layers whose
    parameters are read. DeepSpeed and FSDP gather weights when one of them is called, and each engine at others.
    """
    outermost, module = causal_lm.get_output_embeddings(), output_projection(causal_lm)
    modules: list[Any] = [outermost] if module is outermost else [outermost, module]
    if has_adapter(module):
        layer: Any = module
        factors = [parts[name] for name in _adapters_in_force(layer) for parts in (layer.lora_A, layer.lora_B)]
        modules += [layer.base_layer, *factors]
    return modules


def why_not_sharded(causal_lm: PreTrainedModel, fsdp_version: int) -> str | None:
    """Why FSDP cannot shard the adapter on the head of a model with tied embeddings, and what to do, or `None`."""
    head: Any = causal_lm.get_output_embeddings()
    embedding: Any = causal_lm.get_input_embeddings()
    if not all(parameter.is_contiguous() for parameter in head.parameters()):
        reason = "ensure_weight_tying=True transposes LoRA's factors, which FSDP2 cannot shard: leave it out"
        return reason if fsdp_version == 2 else None
    copy = _saved_module(head)
    if copy is head:
        return None
    if copy.weight is embedding.weight:
        reason = "FSDP1 shards the embedding and the head, which train one weight, apart: use FSDP2"
        return reason if fsdp_version == 1 else None
    if fsdp_version == 1 or not trl_compat.FSDP2_FORBIDS_TIES_OF_HEADS:
        return None
    if head.original_module.weight is getattr(embedding, "original_module", embedding).weight:
        return (
            "FSDP2 shards the embedding and the head apart, but the frozen weight beside the trained copy is the "
            "embedding's: set ensure_weight_tying=True, use LoRA on lm_head, or train with DeepSpeed"
        )
    return None


def has_adapter(module: nn.Module) -> bool:
    """Return `True` if an [`output_projection`] carries LoRA."""
    return hasattr(module, "base_layer")


def _why_not_lora(module: nn.Module) -> str | None:
    """Why an adapter around a linear layer is more than LoRA, or `None`, also where there is no adapter."""
    if hasattr(module, "token_adapter"):
        return "trainable tokens"
    if not hasattr(module, "base_layer"):
        return None
    if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
        return type(module).__name__
    variants = {**getattr(module, "lora_variant", {}), **{n: "DoRA" for n, on in module.use_dora.items() if on}}
    for name, variant in variants.items():
        return f"{name}: {variant if isinstance(variant, str) else type(variant).__name__}"
    return None


def _lora(module: Any, bias: Tensor | None) -> tuple[tuple[LowRank, ...], Tensor | None]:
    """The low-rank terms of the adapters in force, and the bias with theirs."""
    if not hasattr(module, "lora_A"):
        return (), bias
    if module.disable_adapters and module.merged:
        module.unmerge()  # as its own forward would
    terms, parts = [], (module.lora_A, module.lora_B, module.lora_dropout, module.scaling)
    for name in _adapters_in_force(module):
        a, b, dropout, scale = (of_adapters[name] for of_adapters in parts)
        probability = dropout.p if dropout.training and hasattr(dropout, "p") else 0.0
        terms.append(LowRank(a.weight, b.weight, scale, probability))
        if b.bias is not None:
            bias = scale * b.bias if bias is None else bias + scale * b.bias
    return tuple(terms), bias


def _adapters_in_force(module: Any) -> list[str]:
    """The names of the adapters whose low-rank terms count beside the weight."""
    if module.disable_adapters or module.merged:  # what is merged is in the weight already
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def logit_scaling(causal_lm: PreTrainedModel) -> LogitScaling:
    """
    What TRL's own log-probs scale and cap a model's raw logits with; a real scale of 0.0 is kept. TRL >= 1.15 reads it
    from the model's configuration, under the names that model families give it. Before, it is what the model's own
    forward reads: a name that this does not read counts for nothing.
    """
    softcap = _first(causal_lm, *trl_compat.SOFTCAPS)
    scale = _first(causal_lm, "logit_scale", "output_multiplier", "lm_head_multiplier")
    scaling = _first(causal_lm, "logits_scaling")
    if scale is None and scaling is not None:
        # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
        model_type = causal_lm.config.get_text_config().model_type
        scale = scaling if model_type == "hyperclovax" else 1 / scaling
    return LogitScaling(1.0 if scale is None else scale, softcap)


def _first(causal_lm: PreTrainedModel, *names: str) -> float | None:
    """The first of these options that is set; families name the same thing differently."""
    return next((value for name in names if (value := _option(causal_lm, name)) is not None), None)


def _option(causal_lm: PreTrainedModel, name: str) -> float | None:
    way = _way_in_forward(type(causal_lm), name) if trl_compat.LOGPS_FROM_LOGITS else _CONFIGURED
    if way is None:
        return None
    holder: Any = causal_lm
    for part in way:
        holder = getattr(holder, part.removesuffix("()"))
        holder = holder() if part.endswith("()") else holder
    return getattr(holder, name, None)


_CONFIGURED = ("config", "get_text_config()")


@cache
def _way_in_forward(cls: Any, name: str) -> tuple[str, ...] | None:
    """
    From where the forward of a model reads an option: the attributes that lead from the model to what has it, as
    `("config",)`; `None` where it does not read it. Cohere's model keeps the value that it was made with.
    """
    forward = inspect.unwrap(cls.forward)
    try:
        source = inspect.getsource(forward)
    except OSError:  # no source is installed: families that have the option use it
        return _CONFIGURED
    read = re.search(rf"\bself((?:\.\w+(?:\(\))?)*)\.{name}\b", source)
    if read is not None:
        return tuple(filter(None, read[1].split(".")))
    return _CONFIGURED if re.search(rf"\b{name}\b", source) else None
