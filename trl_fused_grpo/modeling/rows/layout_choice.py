"""Which models may have packed rows: what they are known to do with them."""

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.attention.packed import why_replaced
from trl_fused_grpo.modeling.layers.memo import LayerMemo
from trl_fused_grpo.modeling.layers.unpacked import unpacked_layers


# Kinds of layers whose tokens attend to those before them, and kinds that see one token at a time
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
# A kind of layers whose attention chooses its keys
INDEXED_LAYERS = "indexed_attention"
# Kinds of layers that carry a state, some beside attention
STATE_LAYERS = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}


class Traits(NamedTuple):
    """What the modules of a model tell about the rows that it can take."""

    takes_interface: bool  # whether attention may go through transformers' interface
    has_sinks: bool  # whether attention has sinks
    is_causal: bool  # whether no module says that its attention is not
    needs_last_column: bool
    compresses: bool  # whether modules compress the tokens that a layer attends to, padding included
    chooses: bool  # whether modules choose the tokens that a layer attends to
    is_wrapped: bool  # whether layers are checkpointed by a module around them
    drops_out: bool  # whether attention is known to drop out in training


@LayerMemo
def traits(causal_lm: PreTrainedModel) -> Traits:
    """The [`Traits`] of a model."""
    text_model = architecture.text_model(causal_lm)
    modules = list(text_model.modules())
    return Traits(
        takes_interface=architecture.takes_attention_interface(text_model),
        has_sinks=any(hasattr(module, "sinks") for module in modules),
        is_causal=all(getattr(module, "is_causal", True) is not False for module in modules),
        needs_last_column=any(model_compat.rope_follows_length(module) for module in modules),
        compresses=any(map(architecture.compresses_tokens, modules)),
        chooses=any(map(architecture.chooses_tokens, modules)),
        is_wrapped=any(map(torch_compat.is_checkpoint_wrapper, modules)),
        drops_out=any(map(architecture.drops_out_attention, modules)),
    )


def why_not_packed(model: nn.Module, causal_lm: PreTrainedModel, reads_padding: bool = False) -> str | None:
    """Why the rows of a model may not be packed, or `None`."""
    if reads_padding:
        return "TRL's LUSPO of this version reads padding"
    if (reason := model_compat.why_adapter_reads_rows(model)) is not None:
        return reason
    if model_compat.neftune_noise(causal_lm):
        return "the strength of NEFTune's noise depends on the width of the rows"
    if causal_lm.training and traits(causal_lm).drops_out:  # other dropout of attention is seen when it is called
        return "its attention drops out"
    config = causal_lm.config.get_text_config()
    if {causal_lm.config.model_type, config.model_type} & model_compat.PADDING_MATTERS:
        return "its own results depend on the padding"
    if not architecture.takes_position_ids(causal_lm) and not _is_all_state(causal_lm):
        return "it takes no position_ids"
    types = architecture.layer_types(config)
    chosen = {INDEXED_LAYERS} if architecture.chosen_tokens(config) else set[str]()
    if unknown := types - ATTENTION_LAYERS - STATE_LAYERS - chosen:
        return f"it has layers of a kind that is not known ({min(unknown)})"
    if traits(causal_lm).compresses or (traits(causal_lm).chooses and not chosen):
        return "its layers choose by columns which tokens they attend to"
    if not traits(causal_lm).is_causal or not getattr(config, "is_causal", True):
        if architecture.names_no_text_model(causal_lm):
            return "its configuration names no text model, and not all of its attention is causal"
        return "its attention is not causal"  # padding would be attended to
    attention, unpacked = model_compat.attention_implementation(config), unpacked_layers(causal_lm)
    if traits(causal_lm).is_wrapped and (unpacked.with_state or unpacked.attention):
        return (
            "what checkpoints its layers (FSDP's activation_checkpointing) does not let them run unpacked in backward"
        )
    if _is_all_state(causal_lm):
        return None if architecture.takes_any_argument(causal_lm) else "its layers do not get what tells of sequences"
    if not unpacked.attention and not traits(causal_lm).takes_interface:
        return "its attention does not go through transformers' attention interface"
    is_flash = attention in model_compat.flash_implementations()
    if attention not in ("sdpa", "eager") and not is_flash:
        return f"attn_implementation={attention!r} knows no sequence boundaries"
    carries_state = model_compat.is_stateful(causal_lm) or types & STATE_LAYERS
    if carries_state and not unpacked.with_state:
        return "it has layers that carry a state from token to token, which are not known"
    if is_flash and "chunked_attention" in types:
        return "FlashAttention knows no chunks of a sequence"
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if attention == "sdpa" and is_capped and model_compat.SDPA_REFUSES_SOFTCAP:
        return "SDPA does not cap its attention scores"
    if attention == "sdpa" and traits(causal_lm).has_sinks:
        return "SDPA leaves out the sinks of its attention"
    return why_replaced(causal_lm, attention)


def depends_on_width(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if only narrow rows may be packed, see [`why_wide_rows_differ`]."""
    config = causal_lm.config.get_text_config()
    return architecture.unscaled_columns(config) is not None or traits(causal_lm).chooses


def why_wide_rows_differ(causal_lm: PreTrainedModel, size: int, width: int) -> str | None:
    """Why a batch of a model that may have packed rows must be as TRL pads it all the same, or `None`."""
    config = causal_lm.config.get_text_config()
    columns, chosen = architecture.unscaled_columns(config), architecture.chosen_tokens(config)
    if columns is not None and size * width > columns:
        return f"its layers scale queries by column, from column {columns} on"
    if traits(causal_lm).chooses and width > chosen:  # all keys are chosen in narrower rows
        return f"its layers choose {chosen} tokens to attend to, among equal ones by their columns"
    return None


def why_prompts_are_not_shared(causal_lm: PreTrainedModel) -> str | None:
    """
    Why sequences of a packed row may not attend to a prompt elsewhere in it, or `None`: where our function gathers
    keys, and where no layer runs unpacked.
    """
    implementation = model_compat.attention_implementation(causal_lm.config.get_text_config())
    if implementation not in ("sdpa", "eager", *model_compat.flash_implementations()):
        return f"attn_implementation={implementation!r} knows no prompts of several sequences"
    unpacked = unpacked_layers(causal_lm)
    if unpacked.with_state or unpacked.attention:
        return "some layers run on rows of their own, in which each sequence has its prompt"
    return None


@LayerMemo
def _is_all_state(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if a model has known state layers and no attention, so that positions say nothing."""
    # By the names of classes: attention has no part of its own, and takes the same arguments as layers with a state
    names = {type(module).__name__ for module in architecture.text_model(causal_lm).modules()}
    return bool(unpacked_layers(causal_lm).with_state) and not any("Attention" in name for name in names)
