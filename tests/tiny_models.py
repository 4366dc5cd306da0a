"""A tiny model of each family, with random weights, and inputs with images for those that see."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_fused_grpo.parity.tiny import EOS_ID, PAD_ID, VOCAB_SIZE

from .tiny_training import make_inputs


SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1}
IMAGE_ID = 1020


@dataclass(frozen=True)
class Family:
    """
    One model family.

    Args:
        config (`str`): name of its configuration class in transformers.
        options (`dict`): beside [`SHAPE`]; `None` takes an option of it away.
        scale (`float`): multiplier of the logits that the head must find.
        softcap (`float`, *optional*): final softcap that the head must find.
        has_aux_loss (`bool`): whether it adds a load-balancing loss.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    softcap: float | None = None
    has_aux_loss: bool = False


FAMILIES = {
    "llama": Family("LlamaConfig"),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}, has_aux_loss=True
    ),
    "gemma2": Family(
        "Gemma2Config", {"head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 5.0}, softcap=5.0
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        softcap=5.0,
    ),
    "granite": Family("GraniteConfig", {"logits_scaling": 8.0, "attention_multiplier": 0.2}, scale=0.125),
    "cohere": Family("CohereConfig", {"logit_scale": 0.0625}, scale=0.0625),
    "falcon-h1": Family("FalconH1Config", {"lm_head_multiplier": 0.5, **MAMBA}, scale=0.5),
    "gpt2": Family(
        "GPT2Config",
        {
            **dict.fromkeys(SHAPE),
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.1,
            "eos_token_id": EOS_ID,
            "bos_token_id": EOS_ID,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 16, "sliding_window": 4, **EXPERTS},
        has_aux_loss=True,
    ),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "mamba2": Family(
        "Mamba2Config",
        {
            **dict.fromkeys(
                ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
            ),
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": Family(
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            **EXPERTS,
        },
        has_aux_loss=True,
    ),
}


def tiny_model(family: Family) -> PreTrainedModel:
    """A model of the family, always with the same weights."""
    options = {name: value for name, value in {**SHAPE, **family.options}.items() if value is not None}
    config = getattr(transformers, family.config)(**options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # families initialize to constants, or so small that nothing shows
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


def seeing_model(name: str) -> PreTrainedModel:
    """A vision-language model, `"qwen2.5-vl"` or `"gemma3-vl"`, always with the same weights."""
    torch.manual_seed(0)
    text = {**SHAPE, "tie_word_embeddings": False}
    if name == "qwen2.5-vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": 4, "window_size": 8, "fullatt_block_indexes": [0]}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_scaling": rope},
            vision_config=vision,
            image_token_id=IMAGE_ID,
            video_token_id=IMAGE_ID + 1,
            vision_start_token_id=IMAGE_ID + 2,
            vision_end_token_id=IMAGE_ID + 3,
            tie_word_embeddings=False,
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, "head_dim": 16, "sliding_window": 4},
        vision_config={**vision, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=IMAGE_ID,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def seeing_inputs(name: str) -> dict[str, Any]:
    """A micro-batch of four prompts with two, one, one and no image."""
    generator = torch.Generator().manual_seed(2)
    num_images = [2, 1, 1, 0]
    tokens_per_image = 4
    prompts = []
    for count in num_images:
        image = [IMAGE_ID + 2, *[IMAGE_ID] * tokens_per_image, IMAGE_ID + 3]
        prompts.append([5, *image * count, 6, 7])
    width = max(map(len, prompts))
    inputs = make_inputs()
    inputs["prompt_ids"] = torch.tensor([[PAD_ID] * (width - len(p)) + p for p in prompts])
    inputs["prompt_mask"] = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    inputs["completion_ids"] = inputs["completion_ids"].clamp(max=IMAGE_ID - 1)
    images = sum(num_images)
    inputs["num_images"] = num_images
    sees = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1) == IMAGE_ID
    if name == "qwen2.5-vl":
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)  # merged two by two
        inputs["pixel_values"] = torch.randn(images * 16, 3 * 2 * 4 * 4, generator=generator)
        inputs["mm_token_type_ids"] = sees.long()
    else:
        inputs["pixel_values"] = torch.randn(images, 3, 16, 16, generator=generator)
        inputs["token_type_ids"] = sees.long()
    return inputs
