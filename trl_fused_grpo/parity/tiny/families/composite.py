"""Families of a text model with a vision tower."""

from .family import IMAGE_ID, SLIDING, Family


COMPOSITE_FAMILIES = {
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        images="patches",
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
        {"tie_word_embeddings": False, **SLIDING},
        images="typed-pixels",
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
