"""One tiny configuration of each model family and of each unusual head."""

from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from transformers import PretrainedConfig


VOCAB_SIZE = 1027  # odd, so that no tile of a kernel divides it
PAD_ID, EOS_ID, UNK_ID, FIRST_WORD_ID = 0, 1, 2, 3
MARKER_ID = 17  # a word that can stand in every prompt, where PEFT's aLoRA looks for it
IMAGE_ID = 1020  # from here on the image tokens of a model that takes images

_SHAPE: dict[str, Any] = {
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
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1}
_SLIDING = {"head_dim": 16, "sliding_window": 4}
_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


@dataclass(frozen=True)
class Family:
    """
    One model family.

    Attributes:
        config (`str`):
            Name of its configuration class in transformers.
        options (`dict`):
            Added to those of two layers of width 64 over a vocabulary of 1027 tokens; `None` removes one of these.
        scale (`float`):
            Multiplier of the logits, which [`read_lm_head`] must find.
        softcap (`float`, *optional*):
            Final softcap of the logits, which [`read_lm_head`] must find.
        has_aux_loss (`bool`):
            Whether the model adds a load-balancing loss (Mixture-of-Experts).
        vision (`dict`, *optional*):
            Configuration of the vision tower; `options` is then that of the text model.
        composite (`dict`):
            Options of the whole model beside these two.
        flat (`tuple[str, ...]`):
            Ends of the names of parameters whose gradient is zero but for rounding.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    softcap: float | None = None
    has_aux_loss: bool = False
    vision: dict[str, Any] | None = None
    composite: dict[str, Any] = field(default_factory=dict)
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
        removed = {name for name, value in self.options.items() if value is None}
        options = {name: value for name, value in {**_SHAPE, **self.options}.items() if name not in removed}
        if self.vision is None:
            return cls(**options)
        return cls(text_config=options, vision_config=self.vision, **self.composite)


FAMILIES = {
    "llama": Family("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS}, has_aux_loss=True
    ),
    "gemma2": Family("Gemma2Config", {**_SLIDING, "final_logit_softcapping": 5.0}, softcap=5.0),
    "gemma3": Family(
        "Gemma3TextConfig",
        {**_SLIDING, "final_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"]},
        softcap=5.0,
    ),
    "granite": Family("GraniteConfig", {"logits_scaling": 8.0, "attention_multiplier": 0.2}, scale=0.125),
    "cohere": Family("CohereConfig", {"logit_scale": 0.0625}, scale=0.0625),
    "falcon-h1": Family("FalconH1Config", {"lm_head_multiplier": 0.5, **_MAMBA}, scale=0.5),
    "gpt2": Family(
        "GPT2Config",
        {
            **dict.fromkeys(_SHAPE),
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.2,
            "eos_token_id": EOS_ID,
            "bos_token_id": EOS_ID,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "gpt-oss": Family("GptOssConfig", {"num_local_experts": 4, **_SLIDING, **_EXPERTS}, has_aux_loss=True),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "mamba2": Family(
        "Mamba2Config",
        {
            **dict.fromkeys(_ATTENTION),
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": Family(
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            **_EXPERTS,
        },
        has_aux_loss=True,
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 8,
            "fullatt_block_indexes": [0],
        },
        composite={
            "image_token_id": IMAGE_ID,
            "video_token_id": IMAGE_ID + 1,
            "vision_start_token_id": IMAGE_ID + 2,
            "vision_end_token_id": IMAGE_ID + 3,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-vl": Family(
        "Gemma3Config",
        {"tie_word_embeddings": False, **_SLIDING},
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        composite={"mm_tokens_per_image": 4, "image_token_index": IMAGE_ID},
        flat=("k_proj.bias",),  # without rotary positions it adds the same to all attention logits of a query
    ),
}

# Models of the other cases: the kinds of output projection, RoPE, attention and dropout that no family above has
VARIANTS = {
    "tied": Family("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "moe": Family(
        "Qwen3MoeConfig",
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "biased": Family("PhiConfig", {"partial_rotary_factor": 0.5}),
    "scaled": Family("CohereConfig", {"tie_word_embeddings": False, "logit_scale": 0.7}, scale=0.7),
    "wide": Family("LlamaConfig", {"tie_word_embeddings": False, "vocab_size": VOCAB_SIZE + 61}),
    "longrope": Family(
        "Phi3Config",
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5] * 4},
        },
    ),
    "dynamic-rope": Family(
        "LlamaConfig",
        {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "attention-dropout": Family("LlamaConfig", {"attention_dropout": 0.3}),
    "doge": Family("DogeConfig", {"keep_window_size": 6}),
    "phimoe": Family(
        "PhimoeConfig",
        {"num_local_experts": 4, "sliding_window": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    # Attention that does not go through transformers' interface, so that its rows are aligned
    "gptj": Family(
        "GPTJConfig",
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads")),
            "rotary_dim": 8,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "gemma3-bidirectional": Family(
        "Gemma3TextConfig",
        {**_SLIDING, "use_bidirectional_attention": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
VARIANTS |= {
    "gpt2-attention-dropout": replace(FAMILIES["gpt2"], options={**FAMILIES["gpt2"].options, "attn_pdrop": 0.3}),
    "gpt2-dropout": replace(FAMILIES["gpt2"], options={**FAMILIES["gpt2"].options, "resid_pdrop": 0.3}),
}
