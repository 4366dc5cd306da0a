"""Models of the other cases: the kinds of head, RoPE, attention and dropout that no family has."""

from dataclasses import replace

from .attention import ATTENTION_FAMILIES
from .experts import EXPERT_FAMILIES
from .family import ALTERNATING, SLIDING, VOCAB_SIZE, Family


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
    # Its layers without rotary positions scale queries by the column, every four columns
    "llama4-tuned": replace(
        EXPERT_FAMILIES["llama4"], options={**EXPERT_FAMILIES["llama4"].options, "floor_scale": 4}, layout="padded"
    ),
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
}
_GPT2 = ATTENTION_FAMILIES["gpt2"]
VARIANTS |= {
    "gpt2-attention-dropout": replace(_GPT2, options={**_GPT2.options, "attn_pdrop": 0.3}),
    "gpt2-dropout": replace(_GPT2, options={**_GPT2.options, "resid_pdrop": 0.3}),
}
