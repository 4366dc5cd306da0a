"""Models of an architecture with seeded random weights: in a real size, and in a tiny one for smoke tests."""

from typing import Any

import torch
import transformers
from _architectures import Architecture, Options

from trl_fused_grpo.parity.tiny import EOS_ID, PAD_ID


VOCAB = {"real": 151_936, "tiny": 1027}
SPECIAL = 8  # the last token ids stand for images
IMAGE_SIDE = {"real": 448, "tiny": 32}  # pixels


def make_architecture(architecture: Architecture, size: str, device: str, layers: int | None = None) -> Any:
    """
    A model with seeded random float32 weights, as TRL would load it.

    Args:
        architecture ([`Architecture`]): what to build, for example of `ARCHITECTURES`.
        size (`str`): `"real"` or `"tiny"`.
        device (`str`): `"cuda"` or `"cpu"`.
        layers (`int`, *optional*): how many layers instead of all.

    Raises:
        `ImportError`: when the installed transformers lacks the class.
    """
    model_class = getattr(transformers, architecture.model_class, None)
    if model_class is None:
        raise ImportError(f"transformers {transformers.__version__} has no {architecture.model_class}")
    config = _config(model_class.config_class, architecture, size, layers)
    torch.manual_seed(0)
    with torch.device(device):
        return model_class._from_config(config, dtype=torch.float32, attn_implementation=architecture.attention)


def _config(config_class: Any, architecture: Architecture, size: str, layers: int | None) -> Any:
    is_tiny = size == "tiny"
    text: Options = {**architecture.real, **(architecture.tiny if is_tiny else {}), "vocab_size": VOCAB[size]}
    text |= {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    text |= {} if "n_embd" in text else {"max_position_embeddings": 8192}
    if layers is not None:
        text["n_layer" if "n_layer" in text else "num_hidden_layers"] = layers
    if "layer_types" in text:
        names = _names_of_layers(config_class)
        kinds = text["layer_types"][: text["num_hidden_layers"]]
        text["layer_types"] = [names.get(kind, kind) for kind in kinds]
    if architecture.vision is None:
        return config_class(**text)
    vision = {**architecture.vision, **(architecture.tiny_vision if is_tiny else {})}
    first = VOCAB[size] - SPECIAL
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if "mm_tokens_per_image" in architecture.composite:
        ids = ("image_token_index", "boi_token_index", "eoi_token_index")
    tokens = {name: first + i for i, name in enumerate(ids)}
    return config_class(text_config=text, vision_config=vision, **tokens, **architecture.composite)


def _names_of_layers(config_class: Any) -> dict[str, str]:
    """What this transformers calls the layers of a hybrid of Mamba and attention."""
    default = getattr(config_class(), "layer_types", None) or () if "Hybrid" in config_class.__name__ else ()
    return {"linear_attention": "mamba", "full_attention": "attention"} if "mamba" in default else {}
