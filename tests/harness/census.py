"""
The causal models of transformers that no family of `parity --models` is of, each in a tiny configuration that is made
from its class's defaults: `python -m tests.harness --census`.
"""

from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_fused_grpo._compat.tried_architectures import TRIED
from trl_fused_grpo.parity.tiny.families import FAMILIES, SHAPE, UNK_ID, VARIANTS, VOCAB_SIZE, Family


PREFIX = "census:"  # of the names of such models
# What names of options are: of them those that a class has are set
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk")
_OF_ONE = ("n_group", "topk_group", "n_groups", "mamba_n_groups", "first_k_dense_replace", "n_shared_experts")
_SET: dict[str, Any] = {
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_OF_ONE, 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "index_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_chunk_size", "chunk_size", "kv_lora_rank"), 16),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "mamba_n_heads"), 8),
    **dict.fromkeys(("q_lora_rank", "moe_intermediate_size"), 32),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 4),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("n_positions", "original_max_position_embeddings"), 256),
    "attention_chunk_size": 8,
    "n_inner": 128,
    "index_topk": 512,  # more than there are tokens
    "linear_num_value_heads": 4,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
# Where that does not do
_OF_CLASS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"num_experts_per_token": 2, "num_expert_group": 1},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "DeepseekV4ForCausalLM": {"mlp_layer_types": ["moe", "moe"]},  # others choose by a table that is empty here
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "LongcatFlashForCausalLM": {"head_dim": 8, "zero_expert_num": 2},
    "ModernBertDecoderForCausalLM": {"cls_token_id": 2, "sep_token_id": 2},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
# Made of several models, or with a family of their own
_NOT_MADE = {
    f"{name}ForCausalLM"
    for name in ("Blt", "Fuyu", "Git", "Mllama", "Moshi", "Musicgen", "MusicgenMelody", "Phi4Multimodal")
}
# The bias of keys adds the same to all attention logits of a query
_FLAT = ("key.bias", "k_proj.bias", "key_proj.bias", "k_lin.bias", "Wk.bias", "k.bias", "key_layer.bias")


def models() -> list[str]:
    """The names of these models."""
    of_families = {family.config for family in FAMILIES.values()}
    classes = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name in TRIED - _NOT_MADE}
    return [
        f"{PREFIX}{name}"
        for name in sorted(classes)
        if not name.endswith("ForConditionalGeneration") and _config_class(name).__name__ not in of_families
    ]


def add(model: str) -> None:
    """Let a model be one of `VARIANTS`."""
    if model not in VARIANTS:
        name = model.removeprefix(PREFIX)
        config = _config_class(name)()
        VARIANTS[model] = Family(type(config).__name__, _tiny_options(name, config), flat=_FLAT)


def _config_class(name: str) -> Any:
    return getattr(transformers, name).config_class


def _tiny_options(name: str, config: PretrainedConfig) -> dict[str, Any]:
    """The options of a tiny model beside those of all families; `None` for one of these that its class lacks."""
    defaults: dict[str, Any] = config.to_dict()
    width = defaults.get("hidden_size") or defaults.get("n_embd") or defaults.get("d_model") or 1024
    options: dict[str, Any] = {
        option: None for option in SHAPE if option not in defaults and option not in config.attribute_map
    }
    for option, value in defaults.items():
        if option in SHAPE or option.endswith("_id") or not value:
            continue
        if option in _SET:
            options[option] = _SET[option]
        elif option == "layer_types":
            kinds = list(dict.fromkeys(value))
            options |= {option: (kinds * 2)[: max(2, len(kinds))], "num_hidden_layers": max(2, len(kinds))}
        elif "drop" in option and isinstance(value, float):
            options[option] = 0.0
        elif type(value) is int and not any(word in option for word in ("position", "token")):
            options[option] = _tiny_number(option, value, width)
    if defaults.get("kv_lora_rank"):  # heads are made of parts
        options = {option: value for option, value in options.items() if option not in ("head_dim", "qk_head_dim")}
        options["num_key_value_heads"] = SHAPE["num_attention_heads"]
    if type(defaults.get("bos_token_id")) is int:  # may not be `None`
        options["bos_token_id"] = UNK_ID
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        options["is_decoder"] = True
    return options | _OF_CLASS.get(name, {})


def _tiny_number(option: str, value: int, width: int) -> int:
    """The number of an option that a model `width` wide has `value` for."""
    if "vocab" in option:
        return VOCAB_SIZE
    if "heads" in option:
        return SHAPE["num_key_value_heads" if "kv" in option or "key_value" in option else "num_attention_heads"]
    if "layers" in option:
        return min(value, 2)
    return value if value <= 256 else max(16, value * SHAPE["hidden_size"] // width // 8 * 8)
