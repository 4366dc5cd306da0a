"""Families of text alone with layers that carry a state from token to token, most of them beside attention."""

from .family import ATTENTION, EXPERTS, Family


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_MAMBA_AND_ATTENTION = {"layer_types": ["mamba", "attention"]}
# By transformers' own values a state is gone after one token, and what reaches it wrongly would not show
SLOW_DECAY = {"A_log": -1.5}
DELTA_AND_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

STATE_FAMILIES = {
    "falcon-h1": Family(
        "FalconH1Config", {"lm_head_multiplier": 0.5, "mamba_d_ssm": 128, "mamba_chunk_size": 16, **_MAMBA}, scale=0.5
    ),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "lfm2-moe": Family(
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "mamba2": Family(
        "Mamba2Config",
        {**dict.fromkeys(ATTENTION), "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "jamba": Family(
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            **EXPERTS,
        },
        has_aux_loss=True,
        weights={"A_log": -1.0},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {
            **DELTA_AND_ATTENTION,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
        },
        has_aux_loss=True,
        weights=SLOW_DECAY,
    ),
    "olmo-hybrid": Family(
        "OlmoHybridConfig", {**DELTA_AND_ATTENTION, "head_dim": None, "linear_num_key_heads": 4}, weights=SLOW_DECAY
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "moe", "attention"],
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            **_MAMBA_AND_ATTENTION,
            "mamba_chunk_size": 16,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
            "logits_scaling": 8.0,
            "attention_multiplier": 0.2,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.0,  # TRL >= 1.15 asks for `num_experts`, which this configuration lacks
        },
        scale=0.125,
    ),
    "bamba": Family("BambaConfig", {**_MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 16}),
    "zamba2": Family(
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "initializer_range": 0.1,  # by 0.2, float32 itself is too far from float64
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "adapter_rank": 8,
            "chunk_size": 16,
            "num_key_value_heads": 4,
            "use_mamba_kernels": False,
        },
        stock_fails=("'Zamba2Model' object has no attribute 'rotary_emb'",),  # transformers 5.3
        weights={"A_log": -1.0, "dt_bias": 0.0},
    ),
    "minimax": Family(
        "MiniMaxConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 8,
            "head_dim": 16,
            "num_local_experts": 4,
            **EXPERTS,
        },
        has_aux_loss=True,
    ),
    "kimi-linear": Family(
        "KimiLinearConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        weights=SLOW_DECAY,
    ),
}
