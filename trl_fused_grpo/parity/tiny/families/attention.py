"""Families of text alone whose layers mix tokens by attention, and whose other parts are dense."""

from .family import ALTERNATING, EOS_ID, SCALED_BY_POSITION, SHAPE, SLIDING, VOCAB_SIZE, Family


ATTENTION_FAMILIES = {
    "llama": Family("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "gemma2": Family("Gemma2Config", {**SLIDING, "final_logit_softcapping": 5.0}, softcap=5.0),
    "gemma3": Family("Gemma3TextConfig", {**SLIDING, **ALTERNATING, "final_logit_softcapping": 5.0}, softcap=5.0),
    # Its last layers take keys and values from earlier ones, and every layer has embeddings of its own
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 5.0,
        },
        softcap=5.0,
    ),
    "granite": Family("GraniteConfig", {"logits_scaling": 8.0, "attention_multiplier": 0.2}, scale=0.125),
    "cohere": Family("CohereConfig", {"logit_scale": 0.0625}, scale=0.0625),
    "cohere2": Family("Cohere2Config", {**SLIDING, **ALTERNATING, "logit_scale": 0.0625}, scale=0.0625),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "ernie4.5": Family("Ernie4_5Config", {"head_dim": 16}),
    "olmo3": Family("Olmo3Config", {"sliding_window": 4, **ALTERNATING}),
    "exaone4": Family("Exaone4Config", {**SLIDING, **ALTERNATING}),
    "hunyuan": Family("HunYuanDenseV1Config", {"head_dim": 16}),
    "ministral3": Family("Ministral3Config", {"head_dim": 16, **SCALED_BY_POSITION}),
    "phi4": Family("Phi3Config", {"sliding_window": None}),  # the class that Phi-4's checkpoints name
    "gpt2": Family(
        "GPT2Config",
        {
            **dict.fromkeys(SHAPE),
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
}
