"""Tiny models and adapters that no named case has. Importing this module adds them to those of `parity.tiny`."""

from dataclasses import replace

from trl_fused_grpo.parity.tiny import model_config, save_checkpoint, tiny_model
from trl_fused_grpo.parity.tiny.families import (
    ALTERNATING,
    DELTA,
    EXPERTS,
    FAMILIES,
    HEADS,
    NARROW,
    SHARED_EXPERT,
    SLIDING,
    SLOW_DECAY,
    UNTIED,
    VARIANTS,
    Family,
)
from trl_fused_grpo.parity.tiny.models import ADAPTERS, ATTENTION


__all__ = ["model_config", "save_checkpoint", "tiny_model"]

_GPT2, _LLAMA4 = FAMILIES["gpt2"], FAMILIES["llama4"]
# The kinds of RoPE, attention and dropout that no family has
VARIANTS |= {
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
    # Its layers without rotary positions scale queries by the column, every four columns
    "llama4-tuned": replace(_LLAMA4, options={**_LLAMA4.options, "floor_scale": 4}),
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
    # Attention that does not go through transformers' interface
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
        {**SLIDING, "use_bidirectional_attention": True, **ALTERNATING},
    ),
    # Families since transformers 5.24; Dory's layer in the middle runs twice
    "apertus-1.5": Family("Apertus1p5TextConfig", UNTIED),
    "dory": Family(
        "DoryConfig",
        {**SLIDING, "num_hidden_layers": 3, "layer_types": [*ALTERNATING["layer_types"], "sliding_attention"]}
        | {"n_input_layers": 1, "n_output_layers": 1},
    ),
    "lara-mini": Family(
        "LaraMiniConfig",
        {**DELTA, **HEADS, **EXPERTS, **NARROW, **SHARED_EXPERT, "num_hidden_layers": 3, "sliding_window": 4}
        | {"layer_types": ["linear_attention", *ALTERNATING["layer_types"]]},
        weights=SLOW_DECAY,
    ),
    "gpt2-attention-dropout": replace(_GPT2, options={**_GPT2.options, "attn_pdrop": 0.3}),
    "gpt2-dropout": replace(_GPT2, options={**_GPT2.options, "resid_pdrop": 0.3}),
}
MARKER_ID = 17  # a word that can stand in every prompt, where PEFT's aLoRA looks for it
_VIRTUAL, _FEEDFORWARD = {"num_virtual_tokens": 4}, ["down_proj"]
ADAPTERS |= {
    "tied-copy": ("LoraConfig", {**ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "dropout": ("LoraConfig", {**ATTENTION, "lora_dropout": 0.3}),
    "alora": ("LoraConfig", {**ATTENTION, "alora_invocation_tokens": [MARKER_ID]}),
    "prompt-tuning": ("PromptTuningConfig", _VIRTUAL),
    "prefix-tuning": ("PrefixTuningConfig", _VIRTUAL),
    "ia3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", *_FEEDFORWARD], "feedforward_modules": _FEEDFORWARD},
    ),
}
