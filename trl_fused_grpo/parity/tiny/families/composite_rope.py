"""Families of a text model with a vision tower, whose image tokens have positions of three axes."""

from typing import Any

from .experts import GROUPED
from .family import EXPERTS, IMAGE_ID, Family
from .state import DELTA_AND_ATTENTION, SLOW_DECAY


_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": IMAGE_ID + 1,
    "vision_start_token_id": IMAGE_ID + 2,
    "vision_end_token_id": IMAGE_ID + 3,
    "tie_word_embeddings": False,
}
_GLM_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": IMAGE_ID + 1,
    "image_start_token_id": IMAGE_ID + 2,
    "image_end_token_id": IMAGE_ID + 3,
    "video_start_token_id": IMAGE_ID + 4,
    "video_end_token_id": IMAGE_ID + 5,
    "tie_word_embeddings": False,
}
_QWEN2_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "window_size": 8,
    "fullatt_block_indexes": [0],
}
_QWEN3_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 64,
}
_DEEPSTACK = {**_QWEN3_TOWER, "depth": 2, "deepstack_visual_indexes": [0]}
_GLM_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "image_size": 32,
}


def _axes(*sections: int, **options: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **options}


_QWEN3 = {"head_dim": 16, "rope_scaling": _axes(4, 2, 2)}
_QWEN35 = {**DELTA_AND_ATTENTION, "rope_parameters": _axes(2, 1, 1, partial_rotary_factor=0.5)}
_GLM = {"rope_scaling": _axes(2, 1, 1), "partial_rotary_factor": 0.5}
_SMALL_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}

ROPE_FAMILIES = {
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        images="patches",
        vision=_QWEN2_TOWER,
        composite=_TOKENS,
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        {**_QWEN3, "tie_word_embeddings": False},
        images="patches",
        vision=_DEEPSTACK,
        composite=_TOKENS,
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeConfig",
        {**_QWEN3, **_SMALL_EXPERTS, "tie_word_embeddings": False},
        has_aux_loss=True,
        images="patches",
        vision=_DEEPSTACK,
        composite=_TOKENS,
    ),
    "qwen3.5": Family(
        "Qwen3_5Config",
        {**_QWEN35, "tie_word_embeddings": False},
        images="patches",
        vision=_QWEN3_TOWER,
        composite=_TOKENS,
        weights=SLOW_DECAY,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeConfig",
        {**_QWEN35, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 32, "tie_word_embeddings": False},
        has_aux_loss=True,
        images="patches",
        vision=_QWEN3_TOWER,
        composite=_TOKENS,
        weights=SLOW_DECAY,
    ),
    "glm4.1v": Family(
        "Glm4vConfig",
        {**_GLM, "tie_word_embeddings": False},
        images="patches",
        vision=_GLM_TOWER,
        composite=_GLM_TOKENS,
    ),
    "glm4.6v": Family(
        "Glm46VConfig",
        {"model_type": "glm4v_text", **_GLM, "tie_word_embeddings": False},
        images="patches",
        vision={"model_type": "glm4v_vision", **_GLM_TOWER},
        composite=_GLM_TOKENS,
    ),
    "glm4.5v": Family(
        "Glm4vMoeConfig",
        {**GROUPED, "first_k_dense_replace": 1, "head_dim": 16, **_GLM, "tie_word_embeddings": False},
        images="patches",
        vision=_GLM_TOWER,
        composite=_GLM_TOKENS,
    ),
}
