"""Architectures that benchmarks run: options of their configurations, in a real size and in a tiny one."""

from dataclasses import dataclass, field, replace
from typing import Any


Options = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """
    What a benchmark builds and runs.

    Args:
        model_class (`str`): the class of transformers that TRL would load.
        real (`dict`): options of its text configuration, at a size of half a billion parameters or so.
        tiny (`dict`): what a smoke test on the CPU changes in them.
        vision (`dict`, *optional*): options of its vision tower; such a model is composite.
        tiny_vision (`dict`): what a smoke test changes in them.
        composite (`dict`): options of the outer configuration.
        trainer (`dict`): options of all trainers.
        attention (`str`, *optional*): attention to load with instead of transformers' choice.
        images (`bool`): whether each prompt has an image.
        forced (`tuple[str, ...]`): layouts that are also forced.
        target (`float`, *optional*): the most time relative to stock that a step is meant to take.
    """

    model_class: str
    real: Options
    tiny: Options
    vision: Options | None = None
    tiny_vision: Options = field(default_factory=dict)
    composite: Options = field(default_factory=dict)
    trainer: Options = field(default_factory=dict)
    attention: str | None = None
    images: bool = False
    forced: tuple[str, ...] = ()
    target: float | None = None


_QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_QWEN3_VL = Architecture(
    "Qwen3VLForConditionalGeneration",
    {**_QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
    {**_TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}},
    vision={
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "num_position_embeddings": 784,
        "deepstack_visual_indexes": [3, 7, 11],
    },
    tiny_vision={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 8,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    composite={"tie_word_embeddings": True},
)


def _alternating(first: str, then: str, layers: int, every: int) -> list[str]:
    """Layer types of which each `every`-th is `then`."""
    return [then if i % every == every - 1 else first for i in range(layers)]


ARCHITECTURES = {
    "qwen3-0.6b": Architecture("Qwen3ForCausalLM", _QWEN3, _TINY, forced=("padded",)),
    "qwen3-vl-text": replace(_QWEN3_VL, forced=("padded",), target=0.13),
    "qwen3-vl-images": replace(_QWEN3_VL, images=True, target=0.25),
    "gemma3-text": Architecture(
        "Gemma3ForConditionalGeneration",
        {
            "hidden_size": 1152,
            "intermediate_size": 4608,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "layer_types": _alternating("sliding_attention", "full_attention", 24, 6),
            "tie_word_embeddings": True,
        },
        {**_TINY, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 448,
            "patch_size": 14,
        },
        tiny_vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        composite={"mm_tokens_per_image": 4, "tie_word_embeddings": True},
        target=0.13,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        {
            "hidden_size": 1536,
            "intermediate_size": 6912,
            "num_hidden_layers": 16,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
            "tie_word_embeddings": True,
        },
        {**_TINY, "layer_types": ["conv", "full_attention"]},
        target=0.18,
    ),
    "qwen3.5-hybrid": Architecture(
        "Qwen3_5ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": _alternating("linear_attention", "full_attention", 24, 4),
            "tie_word_embeddings": True,
        },
        {
            **_TINY,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        target=0.35,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": _alternating("sliding_attention", "full_attention", 20, 2),
            "tie_word_embeddings": True,
        },
        {
            **_TINY,
            "num_local_experts": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        target=0.25,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "sliding_window": 1024,
            "layer_types": _alternating("sliding_attention", "full_attention", 18, 2),
            "tie_word_embeddings": True,
        },
        {
            **_TINY,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        attention="eager",  # before transformers 5.21 it loads with SDPA, which leaves the cap out
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    # Transformers' own Mamba-2 makes tensors of [batch, chunks, chunk, chunk, heads, state]: chunks must be short
    "granite4-hybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "mamba_n_heads": 16,
            "mamba_d_head": 128,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 32,
            "layer_types": _alternating("linear_attention", "full_attention", 20, 5),
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "shared_intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        trainer={"router_aux_loss_coef": 0.0},  # without experts there are no router's logits
    ),
    "gptj": Architecture(
        "GPTJForCausalLM",
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_inner": 4096, "rotary_dim": 32, "n_positions": 8192},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "rotary_dim": 8},
        target=0.35,
    ),
}
