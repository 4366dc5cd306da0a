"""What a model family is, and the shape of its tiny model."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PretrainedConfig


VOCAB_SIZE = 1027  # odd, so that no tile of a kernel divides it
PAD_ID, EOS_ID, UNK_ID, FIRST_WORD_ID = 0, 1, 2, 3
MARKER_ID = 17  # a word that can stand in every prompt, where PEFT's aLoRA looks for it
IMAGE_ID = 1020  # from here on the image tokens of a model that takes images

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Transformers' 0.02 leaves every distribution uniform, which hides errors in entropy, clipping and quantiles.
    "initializer_range": 0.2,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}
SLIDING = {"head_dim": 16, "sliding_window": 4}
# Queries grow with the position, every eight tokens
SCALED_BY_POSITION = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.1,
    }
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


@dataclass(frozen=True)
class Family:
    """
    One model family.

    Attributes:
        config (`str`): name of its configuration class in transformers.
        options (`dict`): added to those of two layers of width 64 over a vocabulary of 1027 tokens; `None` removes one
            of these.
        scale (`float`): multiplier of the logits, which [`read_lm_head`] must find.
        softcap (`float`, *optional*): final softcap of the logits, which [`read_lm_head`] must find.
        images (`str`, *optional*): format of its images, a name in [`images.FORMATS`].
        stock_fails (`tuple[str, ...]`): parts of the messages with which stock itself fails on some versions. The
            family is skipped there, and only where stock fails so.
        has_aux_loss (`bool`): whether the model adds a load-balancing loss (Mixture-of-Experts).
        vision (`dict`, *optional*): configuration of the vision tower; `options` is then that of the text model.
        composite (`dict`): options of the whole model beside these two.
        weights (`dict[str, float]`): values of parameters by the ends of their names, where transformers' own would
            hide something.
        flat (`tuple[str, ...]`): ends of the names of parameters whose gradient is zero but for rounding.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    softcap: float | None = None
    images: str | None = None
    stock_fails: tuple[str, ...] = ()
    has_aux_loss: bool = False
    vision: dict[str, Any] | None = None
    composite: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    flat: tuple[str, ...] = ()

    def tiny(self) -> PretrainedConfig:
        """
        Configuration of the family's tiny model.

        Raises:
            `ImportError`:
                When the installed transformers lacks the family.
        """
        cls = getattr(transformers, self.config, None)
        if cls is None:
            raise ImportError(f"this transformers has no {self.config}")
        model_type = self.options.get("model_type")
        if model_type is not None and model_type not in transformers.CONFIG_MAPPING:
            raise ImportError(f"this transformers has no {model_type}")
        removed = {name for name, value in self.options.items() if value is None}
        # Copied, since configurations write into what they are given
        given = deepcopy({**SHAPE, **self.options})
        options = {name: value for name, value in given.items() if name not in removed}
        if self.vision is None:
            return cls(**options)
        vision = {"initializer_range": SHAPE["initializer_range"], **self.vision}
        return cls(text_config=options, vision_config=deepcopy(vision), **deepcopy(self.composite))
