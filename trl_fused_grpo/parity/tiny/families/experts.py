"""Families of text alone with a Mixture of Experts, whose layers mix tokens by attention."""

from .family import EXPERTS, SLIDING, Family


# Two experts of four, beside one that all tokens share; the first layer is dense
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Keys and values are compressed together, and heads of values are narrower than those of keys
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

EXPERT_FAMILIES = {
    "qwen3-moe": Family(
        "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}, has_aux_loss=True
    ),
    "gpt-oss": Family("GptOssConfig", {"num_local_experts": 4, **SLIDING, **EXPERTS}, has_aux_loss=True),
    "glm4-moe": Family("Glm4MoeConfig", {**GROUPED, "first_k_dense_replace": 1, "head_dim": 16}),
    "glm4-moe-lite": Family("Glm4MoeLiteConfig", {**GROUPED, **LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    "deepseek-v3": Family("DeepseekV3Config", {**GROUPED, **LATENT, "first_k_dense_replace": 1}),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
        },
        stock_fails=("has no attribute 'last_hidden_state'",),  # TRL >= 1.15 looks for the backbone under its prefix
    ),
    "ernie4.5-moe": Family(
        "Ernie4_5_MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.3,
        },
        has_aux_loss=True,
    ),
    "minimax-m2": Family("MiniMaxM2Config", {"num_local_experts": 4, "head_dim": 16, **EXPERTS}, has_aux_loss=True),
    "hunyuan-moe": Family("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
}
