"""
What a model of transformers is made of: its backbone, the text model in a composite one, layers that carry a state.
Each entry says what differs between versions of transformers, since when or until when.
"""

import functools
import inspect
import sys
from typing import Any

from packaging.version import Version
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .required import TRANSFORMERS


# transformers < 5: vision-language models keep their language backbone in `model`
TRANSFORMERS_4 = Version("5.0.0") > TRANSFORMERS

# Classes that carry a state without a convolution, and so are not known by their parts. The census has
# looked at all families
_STATE_CLASSES = ("LightningAttention", "LinearAttention", "DeltaNet", "GatedDeltaNet")

# Options of heads for classification, in the configurations of GPT-2 and GPT-NeoX among others. Wherever they act, they
# are modules
DROPOUTS_OF_OTHER_HEADS = ("classifier_dropout", "summary_first_dropout")

# Families whose logits are not those of the hidden states, scaled and capped by options that are read: ProphetNet has
# hidden states of its own for predictions, Inkling leaves out the end of the vocabulary, and Inkling 2 caps in a module
_OTHER_LOGITS = ("prophetnet", "inkling_text", "inkling2_text", "inkling2_loop_text")


def has_other_logits(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if the logits of a model are not those of its hidden states and its output projection alone."""
    return causal_lm.config.get_text_config().model_type in _OTHER_LOGITS


def is_composite(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if a model holds a text model beside others, such as a vision tower."""
    return causal_lm.config.get_text_config() is not causal_lm.config


def names_no_text_model(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if a configuration has parts, none of which is said to be that of the text."""
    parts = vars(causal_lm.config).values()
    return not is_composite(causal_lm) and any(isinstance(part, PretrainedConfig) for part in parts)


def may_take_images(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if a model may be called with images."""
    return is_composite(causal_lm) or "pixel_values" in _forward_arguments(type(causal_lm))


def backbone(causal_lm: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that ends in hidden states."""
    module = causal_lm.model if TRANSFORMERS_4 and is_composite(causal_lm) else causal_lm.base_model
    if module is causal_lm:  # Llama 4, and Gemma 3 before transformers 5, name a prefix that they do not have
        module = getattr(causal_lm, "model", causal_lm)
    if module is causal_lm:
        raise ValueError(
            f"{type(causal_lm).__name__} does not name its backbone (base_model_prefix), so its head cannot be "
            "run apart from it: train with use_liger_loss=False."
        )
    return module


def takes_position_ids(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if the backbone of a model takes the positions of its tokens."""
    return "position_ids" in _forward_arguments(type(backbone(causal_lm)))


def takes_any_argument(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if the backbone of a model takes unknown keyword arguments."""
    arguments = _forward_arguments(type(backbone(causal_lm)))
    return any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())


def knows_caches(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if the backbone of a model can be told to keep no cache. GPT-1's has none (transformers < 5)."""
    return takes_any_argument(causal_lm) or "use_cache" in _forward_arguments(type(backbone(causal_lm)))


@functools.cache
def _forward_arguments(cls: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls.forward).parameters)


def text_model(causal_lm: PreTrainedModel) -> nn.Module:
    """The part of a backbone that has the decoder layers: the backbone itself, or the text model in a composite one."""
    if not is_composite(causal_lm):
        return backbone(causal_lm)
    decoder = causal_lm.get_decoder()
    if not hasattr(decoder, "get_output_embeddings"):  # a module of the user's own
        return decoder
    return decoder if decoder.get_output_embeddings() is None else backbone(decoder)


def modules_beside_text(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The parts of a composite model's backbone that are not its text model, such as vision towers; the outermost."""
    module, text, found = backbone(causal_lm), text_model(causal_lm), []
    while module is not text:
        on_path = [child for child in module.children() if any(part is text for part in child.modules())]
        if not on_path:
            break
        found += [child for child in module.children() if child is not on_path[0]]
        module = on_path[0]
    return found


def carries_state(module: nn.Module) -> bool:
    """Return `True` if a module carries a state along the sequence: by a convolution, or by its class."""
    if type(module).__name__.endswith(_STATE_CLASSES):
        return True
    return any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())


def takes_attention_interface(text_model: nn.Module) -> bool:
    """
    Return `True` if modules of a text model may look their attention up in transformers' table: the files of their
    classes know it.
    """
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in _files(text_model))


def attention_with_masks(text_model: nn.Module) -> list[nn.Module]:
    """
    The attention of a text model that reads the masks of transformers by itself: with an indexer that chooses keys, or
    where none of the model's attention goes through transformers' interface.
    """
    indexed = list(filter(chooses_tokens, text_model.modules()))
    if indexed or takes_attention_interface(text_model):
        return indexed
    if not any(hasattr(file, "create_causal_mask") for file in _files(text_model)):
        return []  # nobody knows what its masks are
    takers = {
        name: m for name, m in text_model.named_modules() if name and "attention_mask" in _forward_arguments(type(m))
    }
    return [module for name, module in takers.items() if not any(other.startswith(f"{name}.") for other in takers)]


def _files(text_model: nn.Module) -> set[Any]:
    return {sys.modules.get(type(module).__module__) for module in text_model.modules()}


# Told by the name under which a layer keeps the part that does it, the same in every family
def compresses_tokens(module: nn.Module) -> bool:
    """Return `True` if a module compresses tokens of a few columns into one, as DeepSeek V4's sparse attention does."""
    return getattr(module, "compressor", None) is not None


def chooses_tokens(module: nn.Module) -> bool:
    """
    Return `True` if a module chooses the tokens that it attends to, as the sparse attention of DeepSeek V3.2 and GLM.
    Not every version of transformers names the kind of layer in their configurations.
    """
    return getattr(module, "indexer", None) is not None


def chosen_tokens(config: Any) -> int:
    """How many tokens such a module chooses for each query; 0 where it is not known."""
    return getattr(config, "index_topk", None) or 0


def unscaled_columns(config: Any) -> int | None:
    """
    In how many columns the queries of a model have their own scale, where layers scale them by the column, whatever
    positions they are given: Llama 4's do where they have no rotary positions, and Inkling's. `None` for other models.
    """
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", ())):
        return int(config.floor_scale) - 1
    return getattr(config, "log_scaling_n_floor", None) if config.model_type == "inkling_text" else None


def why_rows_depend_on_others(config: Any) -> str | None:
    """Why what a model of this configuration computes of a row depends on the others in its batch, or `None`."""
    # Doge's router does. transformers < 5.18: without padding SDPA gets no mask, and Doge's own keeps later tokens too
    return "its rows depend on one another" if config.model_type == "doge" else None


def layer_types(config: Any) -> set[str]:
    """The kinds of layers that a text configuration names, under the names that families give the option."""
    names = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return set(names)


def drops_out_attention(module: nn.Module) -> bool:
    """
    Return `True` if a module is attention that drops out in training: by a number that it passes on, or a dropout named
    after attention. Dropout of what attention returns is another.
    """
    if "Attention" not in type(module).__name__:
        return False
    for name, value in (*vars(module).items(), *module.named_children()):
        if "drop" in name and "hidden" not in name and "resid" not in name:
            if isinstance(value, nn.Dropout):
                value = value.p if "att" in name else 0.0
            if isinstance(value, float) and value > 0:
                return True
    return False
