"""Models of the other cases: the kinds of head that no family has, and experts without auxiliary loss."""

from .family import VOCAB_SIZE, Family


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
}
