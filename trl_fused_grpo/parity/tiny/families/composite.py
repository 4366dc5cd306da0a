"""Families of a text model with a vision tower, whose image tokens have positions like words."""

from .experts import GROUPED, LATENT
from .family import EOS_ID, IMAGE_ID, SCALED_BY_POSITION, SLIDING, VOCAB_SIZE, Family


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64}
# The last layers take keys and values from earlier ones, and every layer has embeddings of its own
_GEMMA4 = {
    "tie_word_embeddings": False,
    **SLIDING,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 5.0,
}
_GEMMA4_TOWER = {
    **{name: value for name, value in _TOWER.items() if name != "image_size"},
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
_GEMMA4_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": IMAGE_ID + 1,
    "boi_token_id": IMAGE_ID + 2,
    "eoi_token_id": IMAGE_ID + 3,
    "audio_token_id": IMAGE_ID + 4,
    "boa_token_id": IMAGE_ID + 5,
    "eoa_token_index": IMAGE_ID + 6,
    "audio_config": None,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}

COMPOSITE_FAMILIES = {
    "gemma3-vl": Family(
        "Gemma3Config",
        {"tie_word_embeddings": False, **SLIDING},
        images="typed-pixels",
        vision=_TOWER,
        composite={"mm_tokens_per_image": 4, "image_token_index": IMAGE_ID},
        stock_fails=("`token_type_ids` is required as a model input when training",),  # text alone, transformers 5.3
        flat=("k_proj.bias",),  # without rotary positions it adds the same to all attention logits of a query
    ),
    "gemma4": Family(
        "Gemma4Config", _GEMMA4, softcap=5.0, images="placed-patches", vision=_GEMMA4_TOWER, composite=_GEMMA4_TOKENS
    ),
    # As the largest checkpoints: no shared layers, keys are values, experts, images that see all of themselves
    "gemma4-moe": Family(
        "Gemma4Config",
        {
            **SLIDING,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 5.0,
        },
        softcap=5.0,
        images="placed-patches",
        vision=_GEMMA4_TOWER,
        composite=_GEMMA4_TOKENS,
    ),
    "mistral3": Family(
        "Mistral3Config",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "tie_word_embeddings": False},
        images="padded-pixels",
        vision=_PIXTRAL,
        composite={"image_token_index": IMAGE_ID, "tie_word_embeddings": False},
    ),
    "mistral4": Family(
        "Mistral3Config",
        {
            "model_type": "mistral4",
            **SCALED_BY_POSITION,
            **GROUPED,
            **LATENT,
            "first_k_dense_replace": 1,
            "tie_word_embeddings": False,
        },
        images="padded-pixels",
        vision=_PIXTRAL,
        composite={"image_token_index": IMAGE_ID, "tie_word_embeddings": False},
    ),
    "llava": Family(
        "LlavaConfig",
        {"model_type": "llama", "tie_word_embeddings": False},
        images="patch-pixels",
        vision={**_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 32},
        composite={"image_token_index": IMAGE_ID, "image_seq_length": 16, "tie_word_embeddings": False},
        flat=("k_proj.bias",),
    ),
    "lfm2-vl": Family(
        "Lfm2VlConfig",
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 32,
            "tie_word_embeddings": False,
        },
        images="shaped-patches",
        vision={
            **{name: value for name, value in _TOWER.items() if name != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 64,
            "vision_use_head": False,
        },
        composite={"image_token_id": IMAGE_ID, "projector_hidden_size": 32, "tie_word_embeddings": False},
        # Transformers 4 cannot read its own configuration back; TRL < 1.8 leaves the shapes of images out
        stock_fails=("has model type `lfm2-vl`", "'NoneType' object has no attribute 'shape'"),
        flat=("k_proj.bias",),
    ),
    "internvl": Family(
        "InternVLConfig",
        {"model_type": "qwen2", "tie_word_embeddings": False},
        images="tiles",
        vision={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        composite={"image_token_id": IMAGE_ID, "image_seq_length": 4, "tie_word_embeddings": False},
    ),
}
