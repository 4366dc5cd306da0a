"""Cases of hooks on the model, replaced layers, adapters, and models with their own positions, masks or dropout."""

from typing import Any

from trl_fused_grpo.parity.case import Case
from trl_fused_grpo.parity.customisations import models as m

from .common import AS_PADDED, KL, OFF_POLICY, SAMPLED, VLLM, WITH_MARKER
from .common import customised_case as _case


MULTIPLE = {"pad_to_multiple_of": 8}
NO_AUX_LOSS = {"router_aux_loss_coef": 0.0}


def hooks() -> list[Case]:
    return [
        _case("model-hook-sees", "a hook on the model sees its output", m.on_model(m.see_output)),
        _case("model-hook-changes", "a hook on the model changes its output", m.on_model(m.scale_output)),
        _case("model-pre-hook", "a hook on the model changes its input", m.pre_hook()),
        _case("head-hook", "a hook on lm_head, which TRL calls up to 1.14", m.on_head(m.scale_tensor)),
        _case("layer-hook-sees", "a hook on a layer sees the shape of rows", m.on_layer(m.see_hidden)),
        _case("layer-hook-token", "a hook on a layer changes each token", m.on_layer(m.by_token)),
        _case("layer-hook-column", "a hook on a layer adds something by column", m.on_layer(m.by_column)),
        _case("layer-hook-batch", "a hook on a layer scales by the number of rows", m.on_layer(m.by_batch)),
        _case("layer-hook-column-vllm", "by column, vLLM", m.on_layer(m.by_column), VLLM, data=SAMPLED),
        _case("parameter-hook-clips", "hooks on parameters clip gradients", m.parameter_hook(m.clip)),
        _case("parameter-hook-sees", "hooks on parameters see each gradient", m.parameter_hook(m.see_norm)),
        _case("accumulate-hook", "a hook after a gradient was accumulated", m.accumulate_hook()),
        _case("backward-hook", "a full backward hook on a layer", m.backward_hook()),
        _case("layer-forward-column", "layer.forward replaced, by column", m.layer_forward(m.by_column)),
        _case("layer-forward-token", "layer.forward replaced, by token", m.layer_forward(m.by_token)),
        _case("mlp-forward-batch", "mlp.forward replaced, by number of rows", m.mlp_forward(m.by_batch)),
    ]


def models() -> list[Case]:
    return [
        _case("own-backbone", "a backbone with a forward of its own", m.own_backbone()),
        _case("own-class", "a causal LM with a forward of its own", m.own_class()),
        _case("own-attention", "an attention function of one's own, by column", m.own_attention()),
        _case(
            "longrope", "RoPE longrope around its switching length, old log-probs", config=OFF_POLICY, model="longrope"
        ),
        _case("longrope-vllm", "the same, vLLM", config=VLLM, data=SAMPLED, model="longrope"),
        _case("longrope-multiple", "longrope, TRL's rows longer than any sequence", config=MULTIPLE, model="longrope"),
        _case(
            "dynamic-rope",
            "RoPE dynamic beyond its original length, old log-probs",
            config=OFF_POLICY,
            model="dynamic-rope",
        ),
        _case(
            "dynamic-rope-multiple",
            "dynamic, TRL's rows longer than any sequence",
            config=MULTIPLE,
            model="dynamic-rope",
        ),
        _case("doge", "Doge's dynamic mask", config=NO_AUX_LOSS, model="doge"),
        _case("phimoe", "Phi-MoE's sliding window", m.without_sampled_routing(), NO_AUX_LOSS, model="phimoe"),
        _case("qwen2-moe", "Qwen2-MoE's sliding window", config=NO_AUX_LOSS, model="qwen2-moe"),
        _case("gemma3-bidirectional", "Gemma 3 with bidirectional attention", model="gemma3-bidirectional"),
        _case("gpt2-attention-dropout", "attn_pdrop", model="gpt2-attention-dropout"),
        _case("attention-dropout", "attention_dropout", model="attention-dropout"),
        _case(
            "attention-dropout-vllm", "attention_dropout, vLLM", config=VLLM, data=SAMPLED, model="attention-dropout"
        ),
        _case("gpt2-dropout", "resid_pdrop, TRL's padding", model="gpt2-dropout", fused=AS_PADDED),
        _case("neftune", "NEFTune's noise", config={"neftune_noise_alpha": 5.0}),
    ]


def adapters() -> list[Case]:
    checkpointing = {"gradient_checkpointing": True}

    def case(name: str, description: str, adapter: str, config: dict[str, Any] | None = None, **more: Any) -> Case:
        return _case(name, description, None, config, adapter=adapter, noise=0.02, **more)

    return [
        case("lora", "LoRA on the attention's projections", "attention"),
        case("lora-kl", "LoRA, beta with adapters disabled", "attention", KL),
        case("lora-dropout", "lora_dropout, TRL's padding", "dropout", fused=AS_PADDED),
        case("lora-dropout-checkpointing", "the same with checkpointing", "dropout", checkpointing, fused=AS_PADDED),
        case("alora", "aLoRA's invocation in every prompt", "alora", data=WITH_MARKER),
        case("prompt-tuning", "virtual tokens before each row", "prompt-tuning"),
        case("prefix-tuning", "virtual keys before each row", "prefix-tuning"),
        case("ia3", "IA3", "ia3"),
        case("head-copy", "modules_to_save of lm_head", "head-copy"),
        case("tied-copy", "modules_to_save tied by ensure_weight_tying", "tied-copy", model="tied"),
    ]
