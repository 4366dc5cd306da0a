"""One tiny configuration of each model family (`FAMILIES`), and models of the other cases (`VARIANTS`)."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PretrainedConfig


VOCAB_SIZE = 1027  # odd, so that no tile of a kernel divides it
PAD_ID, EOS_ID, UNK_ID, FIRST_WORD_ID = 0, 1, 2, 3
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
        vision (`dict`, *optional*): configuration of the vision tower; `options` is then that of the text model, whose
            embeddings are not tied.
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
    vision: dict[str, Any] | None = None
    composite: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    flat: tuple[str, ...] = ()

    @property
    def has_aux_loss(self) -> bool:
        """`True` if the model adds a load-balancing loss (Mixture-of-Experts)."""
        return "output_router_logits" in self.options

    def tiny(self) -> PretrainedConfig:
        """
        Configuration of the family's tiny model.

        Raises:
            `ImportError`: when the installed transformers lacks the family.
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
        text = {"tie_word_embeddings": False, **options}
        return cls(text_config=text, vision_config=deepcopy(vision), **deepcopy(self.composite))


UNTIED = {"tie_word_embeddings": False}

# Attention
HEADS = {"head_dim": 16}
SLIDING = {**HEADS, "sliding_window": 4}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
SOFTCAP = {"final_logit_softcapping": 5.0}
GRANITE = {"logits_scaling": 8.0, "attention_multiplier": 0.2}
NO_ROPE_IN_SECOND = {"no_rope_layers": [1, 0]}
# Gemma-3n and Gemma-4: the last layers take keys and values from earlier ones, and every layer has its own embeddings
_LAYERS = {"num_hidden_layers": 4, "layer_types": 2 * ALTERNATING["layer_types"], "num_kv_shared_layers": 2}
SHARED_LAYERS = {**_LAYERS, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
# Queries grow with the position, every eight tokens
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
SCALED_BY_POSITION = {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}
# Keys and values are compressed together, and heads of values are narrower than those of keys
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}

# Experts: a token takes two of four
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": 32}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}  # one that all tokens take too
# Beside one that all tokens share, the second time in groups
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, **NARROW}
GROUPED = {**ROUTED, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DENSE_FIRST = {"first_k_dense_replace": 1}

# Layers that carry a state from token to token
CONV = {"layer_types": ["conv", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
# By transformers' own values a state is gone after one token, and what reaches it wrongly would not show
SLOW_DECAY = {"A_log": -1.5}

NO_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def _whole(*tokens: str, **options: Any) -> dict[str, Any]:
    """The options of a composite model. The image tokens have these names, and ids in turn."""
    return {**{name: IMAGE_ID + i for i, name in enumerate(tokens)}, **UNTIED, **options}


def _seeing(images: str, vision: dict[str, Any], composite: dict[str, Any]) -> dict[str, Any]:
    """Fields of a family with a vision tower."""
    return {"images": images, "vision": vision, "composite": composite}


def _axes(*sections: int, **options: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **options}


# Vision towers whose image tokens have positions of three axes
_SHARED = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
_QWEN_TOWER = {**_SHARED, "depth": 1, "num_position_embeddings": 64}
_GLM_TOWER = {**_SHARED, "depth": 1, "image_size": 32}
_QWEN_TOKENS = _whole("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_GLM_TOKENS = _whole("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id") | {
    "video_start_token_id": IMAGE_ID + 4,
    "video_end_token_id": IMAGE_ID + 5,
}
_QWEN3 = {**HEADS, "rope_scaling": _axes(4, 2, 2)}
_QWEN35 = {**LINEAR, **DELTA, **HEADS, "rope_parameters": _axes(2, 1, 1, partial_rotary_factor=0.5)}
_GLM = {"rope_scaling": _axes(2, 1, 1), "partial_rotary_factor": 0.5}
_QWEN2_IMAGES = _seeing(
    "patches", {**_SHARED, "depth": 1, "window_size": 8, "fullatt_block_indexes": [0]}, _QWEN_TOKENS
)
_QWEN3_IMAGES = _seeing("patches", {**_QWEN_TOWER, "depth": 2, "deepstack_visual_indexes": [0]}, _QWEN_TOKENS)
_QWEN35_IMAGES = _seeing("patches", _QWEN_TOWER, _QWEN_TOKENS)
_GLM_IMAGES = _seeing("patches", _GLM_TOWER, _GLM_TOKENS)

# Vision towers whose image tokens have positions like words
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_SMALL_TOWER = {**_TOWER, "image_size": 16}
_PIXTRAL_IMAGES = _seeing(
    "padded-pixels", {**_TOWER, **HEADS, "model_type": "pixtral", "image_size": 64}, _whole("image_token_index")
)
_GEMMA4_TOKENS = ("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id", "audio_token_id", "boa_token_id")
_GEMMA4_IMAGES = _seeing(
    "placed-patches",
    {**_TOWER, **HEADS, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 16},
    _whole(*_GEMMA4_TOKENS, "eoa_token_index", audio_config=None, eos_token_id=EOS_ID),
)

FAMILIES: dict[str, Family] = {
    # Text alone: attention and dense layers
    "llama": Family("LlamaConfig", UNTIED),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", HEADS),
    "gemma2": Family("Gemma2Config", {**SLIDING, **SOFTCAP}, softcap=5.0),
    "gemma3": Family("Gemma3TextConfig", {**SLIDING, **ALTERNATING, **SOFTCAP}, softcap=5.0),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {**SLIDING, **SHARED_LAYERS, **SOFTCAP}
        | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 8, "altup_num_inputs": 2},
        softcap=5.0,
    ),
    "granite": Family("GraniteConfig", GRANITE, scale=0.125),
    "cohere": Family("CohereConfig", {"logit_scale": 0.0625}, scale=0.0625),
    "cohere2": Family("Cohere2Config", {**SLIDING, **ALTERNATING, "logit_scale": 0.0625}, scale=0.0625),
    "smollm3": Family("SmolLM3Config", NO_ROPE_IN_SECOND),
    "ernie4.5": Family("Ernie4_5Config", HEADS),
    "olmo3": Family("Olmo3Config", {"sliding_window": 4, **ALTERNATING}),
    "exaone4": Family("Exaone4Config", {**SLIDING, **ALTERNATING}),
    "hunyuan": Family("HunYuanDenseV1Config", HEADS),
    "ministral3": Family("Ministral3Config", {**HEADS, **SCALED_BY_POSITION}),
    "phi4": Family("Phi3Config", {"sliding_window": None}),  # the class that Phi-4's checkpoints name
    "gpt2": Family(
        "GPT2Config",
        dict.fromkeys(SHAPE)
        | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2, **NO_DROPOUT}
        | {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "bos_token_id": EOS_ID},
    ),
    # Text alone: attention and a Mixture of Experts
    "qwen3-moe": Family("Qwen3MoeConfig", {**EXPERTS, **NARROW, **AUX_LOSS}),
    "gpt-oss": Family("GptOssConfig", {**LOCAL_EXPERTS, **AUX_LOSS, **SLIDING}),
    "glm4-moe": Family("Glm4MoeConfig", {**GROUPED, **DENSE_FIRST, **HEADS}),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteConfig", {**GROUPED, **LATENT, "q_lora_rank": 32, "mlp_layer_types": ["dense", "sparse"]}
    ),
    "deepseek-v3": Family("DeepseekV3Config", {**GROUPED, **LATENT, "q_lora_rank": 32, **DENSE_FIRST}),
    "llama4": Family(
        "Llama4TextConfig",
        {**LOCAL_EXPERTS, "num_experts_per_tok": 1, "moe_layers": [1], "intermediate_size_mlp": 128}
        | {**HEADS, **NO_ROPE_IN_SECOND, "attention_chunk_size": 8},
        stock_fails=("has no attribute 'last_hidden_state'",),  # TRL >= 1.15 looks for the backbone under its prefix
    ),
    "ernie4.5-moe": Family(
        "Ernie4_5_MoeConfig",
        {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
        | {**NARROW, **AUX_LOSS, **HEADS},
    ),
    "minimax-m2": Family("MiniMaxM2Config", {**LOCAL_EXPERTS, **AUX_LOSS, **HEADS}),
    "hunyuan-moe": Family("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, **HEADS}),
    # Text alone: layers with a state, most of them beside attention
    "falcon-h1": Family("FalconH1Config", {**MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.5}, scale=0.5),
    "lfm2": Family("Lfm2Config", {**CONV, "block_multiple_of": 32}),
    "lfm2-moe": Family("Lfm2MoeConfig", {**CONV, **EXPERTS, **NARROW, "num_dense_layers": 1}),
    "mamba2": Family(
        "Mamba2Config",
        dict.fromkeys(NO_ATTENTION) | {**HEADS, "num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "jamba": Family(
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {**EXPERTS, **AUX_LOSS, "expert_layer_period": 2, "expert_layer_offset": 1},
        weights={"A_log": -1.0},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {**LINEAR, **DELTA, **HEADS, **EXPERTS, **NARROW, **AUX_LOSS, **SHARED_EXPERT},
        weights=SLOW_DECAY,
    ),
    "olmo-hybrid": Family("OlmoHybridConfig", {**LINEAR, **DELTA, "linear_num_key_heads": 4}, weights=SLOW_DECAY),
    "nemotron-h": Family(
        "NemotronHConfig",
        {**HEADS, "num_hidden_layers": None, "layers_block_type": ["mamba", "moe", "attention"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}
        | {**ROUTED, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        {**GRANITE, **MAMBA, "layer_types": ["mamba", "attention"], **LOCAL_EXPERTS, "shared_intermediate_size": 32}
        | {"router_aux_loss_coef": 0.0},  # TRL >= 1.15 asks for `num_experts`, which this configuration lacks
        scale=0.125,
    ),
    "bamba": Family("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "zamba2": Family(
        "Zamba2Config",
        {"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4, "adapter_rank": 8}
        | {"mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 16, "use_mamba_kernels": False}
        | {"initializer_range": 0.1},  # by 0.2, float32 itself is too far from float64
        stock_fails=("'Zamba2Model' object has no attribute 'rotary_emb'",),  # transformers 5.3
        weights={"A_log": -1.0, "dt_bias": 0.0},
    ),
    "minimax": Family("MiniMaxConfig", {**LINEAR, "block_size": 8, **HEADS, **LOCAL_EXPERTS, **AUX_LOSS}),
    "kimi-linear": Family(
        "KimiLinearConfig",
        {**LINEAR, "linear_head_dim": 16, "linear_num_heads": 4, **LATENT}
        | {**LOCAL_EXPERTS, **NARROW, "mlp_layer_types": ["dense", "sparse"]},
        weights=SLOW_DECAY,
    ),
    # With a vision tower: image tokens have positions of three axes
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, **_QWEN2_IMAGES
    ),
    "qwen3-vl": Family("Qwen3VLConfig", _QWEN3, **_QWEN3_IMAGES),
    "qwen3-vl-moe": Family("Qwen3VLMoeConfig", {**_QWEN3, **EXPERTS, **NARROW, **AUX_LOSS}, **_QWEN3_IMAGES),
    "qwen3.5": Family("Qwen3_5Config", _QWEN35, **_QWEN35_IMAGES, weights=SLOW_DECAY),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeConfig",
        {**_QWEN35, **EXPERTS, **NARROW, **AUX_LOSS, **SHARED_EXPERT},
        **_QWEN35_IMAGES,
        weights=SLOW_DECAY,
    ),
    "glm4.1v": Family("Glm4vConfig", _GLM, **_GLM_IMAGES),
    "glm4.6v": Family(
        "Glm46VConfig",
        {**_GLM, "model_type": "glm4v_text"},
        **_seeing("patches", {**_GLM_TOWER, "model_type": "glm4v_vision"}, _GLM_TOKENS),
    ),
    "glm4.5v": Family("Glm4vMoeConfig", {**_GLM, **GROUPED, **DENSE_FIRST, **HEADS}, **_GLM_IMAGES),
    # With a vision tower: image tokens have positions like words
    "gemma3-vl": Family(
        "Gemma3Config",
        SLIDING,
        **_seeing("typed-pixels", _SMALL_TOWER, {"mm_tokens_per_image": 4, "image_token_index": IMAGE_ID}),
        stock_fails=("`token_type_ids` is required as a model input when training",),  # text alone, transformers 5.3
        flat=("k_proj.bias",),  # without rotary positions it adds the same to all attention logits of a query
    ),
    "gemma4": Family(
        "Gemma4Config",
        {**SLIDING, **SHARED_LAYERS, **SOFTCAP, "global_head_dim": 32, "use_double_wide_mlp": True},
        **_GEMMA4_IMAGES,
        softcap=5.0,
    ),
    # As the largest checkpoints: no shared layers, keys are values, experts, images that see all of themselves
    "gemma4-moe": Family(
        "Gemma4Config",
        {**SLIDING, **ALTERNATING, **SOFTCAP, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, **NARROW},
        **_GEMMA4_IMAGES,
        softcap=5.0,
    ),
    "mistral3": Family("Mistral3Config", {"model_type": "mistral", **HEADS, "sliding_window": None}, **_PIXTRAL_IMAGES),
    "mistral4": Family(
        "Mistral3Config",
        {"model_type": "mistral4", **SCALED_BY_POSITION, **GROUPED, **LATENT, "q_lora_rank": 32, **DENSE_FIRST},
        **_PIXTRAL_IMAGES,
    ),
    "llava": Family(
        "LlavaConfig",
        {"model_type": "llama"},
        images="patch-pixels",
        vision={**_SMALL_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 32},
        composite=_whole("image_token_index", image_seq_length=16),
        flat=("k_proj.bias",),
    ),
    "lfm2-vl": Family(
        "Lfm2VlConfig",
        {"model_type": "lfm2", **CONV, "block_multiple_of": 32},
        images="shaped-patches",
        vision={**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 64, "vision_use_head": False},
        composite=_whole("image_token_id", projector_hidden_size=32),
        # Transformers 4 cannot read its own configuration back; TRL < 1.8 leaves the shapes of images out
        stock_fails=("has model type `lfm2-vl`", "'NoneType' object has no attribute 'shape'"),
        flat=("k_proj.bias",),
    ),
    "internvl": Family(
        "InternVLConfig",
        {"model_type": "qwen2"},
        images="tiles",
        vision={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        composite=_whole("image_token_id", image_seq_length=4),
    ),
}

# The kinds of head that no family has, and experts without auxiliary loss
VARIANTS: dict[str, Family] = {
    "tied": Family("Qwen3Config", {**HEADS, "tie_word_embeddings": True}),
    "moe": Family("Qwen3MoeConfig", {**UNTIED, **EXPERTS, "moe_intermediate_size": 64, "decoder_sparse_step": 1}),
    "biased": Family("PhiConfig", {"partial_rotary_factor": 0.5}),
    "scaled": Family("CohereConfig", {**UNTIED, "logit_scale": 0.7}, scale=0.7),
    "wide": Family("LlamaConfig", {**UNTIED, "vocab_size": VOCAB_SIZE + 61}),
}
