"""Cases of hooks on the model, replaced layers and their parts, adapters, models with positions, masks or dropout."""

from typing import Any

import torch

from tests.harness.case import Training
from tests.harness.customisations import layers as p
from tests.harness.customisations import models as m

from .common import AS_PADDED, KL, OFF_POLICY, SAMPLED, UNEVEN, VLLM
from .common import customised_case as _case


SDPA, SDPA_FILE = "scaled_dot_product_attention", "transformers.integrations.sdpa_attention"
MULTIPLE = {"pad_to_multiple_of": 8}
NO_AUX_LOSS = {"router_aux_loss_coef": 0.0}


def hooks() -> list[Training]:
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
        _case("optimizer-in-backward", "torch's optimizers in the backward", m.optimizer_in_backward()),
        _case("backward-hook", "a full backward hook on a layer", m.backward_hook()),
        _case("layer-forward-column", "layer.forward replaced, by column", m.layer_forward(m.by_column)),
        _case("layer-forward-token", "layer.forward replaced, by token", m.layer_forward(m.by_token)),
        _case("mlp-forward-batch", "mlp.forward replaced, by number of rows", m.mlp_forward(m.by_batch)),
    ]


def parts_of_layers() -> list[Training]:
    def case(name: str, description: str, replace: p.Replace, **config: Any) -> Training:
        return _case(f"part-{name}", description, p.replaced(replace), config)

    def later(name: str, description: str, replace: p.Replace, attention: str | None = None, **config: Any) -> Training:
        custom, data = p.replaced_later(replace, attention), config.pop("data", UNEVEN)
        return _case(f"part-{name}-later", f"{description}, after the first step", custom, config, data=data)

    again: dict[str, Any] = {"gradient_checkpointing": True}
    rotary, in_file = p.function_in_file("apply_rotary_pos_emb"), p.function_in_file("eager_attention_forward")
    repeat, repeat_eager = p.function_in_file("repeat_kv", SDPA_FILE), p.function_in_file("repeat_kv")
    eps = p.attribute_of(p.norm, "variance_epsilon", lambda value: 0.3)
    angles, last_norm = (lambda model: model.model.rotary_emb), (lambda model: model.model.norm)
    queries_grow = p.function_in_file("apply_rotary_pos_emb", change=p.grown)
    dropout = p.attribute_of(lambda model: p.layer(model).self_attn, "attention_dropout", lambda value: 0.3)
    own_norm = p.attribute_of(lambda model: model.model, "norm", p.OwnNorm)
    own_mlp = p.attribute_of(p.layer, "mlp", p.OwnMLP)
    tanh = p.attribute_of(p.mlp, "act_fn", lambda function: torch.nn.Tanh())
    return [
        case("norm-forward", "norm.forward replaced", p.forward_of(p.norm)),
        case("norm-class", "the forward of the norms' class replaced", p.class_forward_of(p.norm), **again),
        later("norm-class", "the forward of the norms' class replaced", p.class_forward_of(p.norm)),
        case("norm-hook", "a hook on a norm changes what it returns", p.hook_on(p.norm), **again),
        later("norm-eps", "norm.variance_epsilon replaced", eps, **again),
        case("norm", "model.norm replaced by a module of the user's", own_norm),
        case("activation", "mlp.act_fn replaced", tanh),
        later("activation-hook", "a hook on mlp.act_fn changes what it returns", p.hook_on(p.activation)),
        case("activation-class", "the forward of the activations' class replaced", p.class_forward_of(p.activation)),
        later("silu", "torch.nn.functional.silu replaced", p.function_of_torch("silu"), **again),
        later("mlp", "layer.mlp replaced by a module of the user's", own_mlp),
        case("rotary", "apply_rotary_pos_emb replaced in the model's file", rotary, **again),
        later("rotate-half", "rotate_half replaced in the model's file", p.rotate_half),
        case("projection", "q_proj.forward replaced", p.forward_of(p.queries)),
        later("linear-class", "nn.Linear.forward replaced", p.class_forward_of(p.queries)),
        later("mlp-mixes", "a subclass of the MLP that mixes tokens", p.subclass_of(p.mlp, p.mixed)),
        later("norm-mixes", "a subclass of the last norm that mixes tokens", p.subclass_of(last_norm, p.mixed)),
        case("positions", "a rotary embedding by columns", p.subclass_of(angles, p.by_columns)),
        later("positions", "a rotary embedding by columns", p.subclass_of(angles, p.by_columns)),
        later("rotary-column", "queries that grow by column", queries_grow),
        later("dropout", "attention_dropout set", dropout),
        later("dropout-vllm", "attention_dropout set, vLLM", dropout, None, data=SAMPLED, **VLLM),
        case("mask", "create_causal_mask replaced in the model's file", p.mask_in_file),
        later("mask", "create_causal_mask replaced in the model's file", p.mask_in_file, **again),
        later("sdpa", "torch's scaled_dot_product_attention replaced", p.function_of_torch(SDPA)),
        later("repeat-kv", "repeat_kv replaced where SDPA is called", repeat),
        later("eager", "eager_attention_forward replaced in the model's file", in_file, "eager"),
        later("softmax", "torch.nn.functional.softmax replaced, eager", p.function_of_torch("softmax"), "eager"),
        later("repeat-kv-eager", "repeat_kv replaced in the model's file, eager", repeat_eager, "eager"),
        later("linear", "torch.nn.functional.linear replaced", p.function_of_torch("linear"), **again),
    ]


def models() -> list[Training]:
    return [
        _case("own-backbone", "a backbone with a forward of its own", m.own_backbone()),
        _case("own-class", "a causal LM with a forward of its own", m.own_class()),
        _case("own-attention", "the user's attention function, by column", m.own_attention()),
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
        _case(
            "attention-dropout-lora-kl",
            "the same, beta with adapters disabled",
            config=KL,
            model="attention-dropout",
            adapter="attention",
            noise=0.02,
        ),
        _case("gpt2-dropout", "resid_pdrop, TRL's padding", model="gpt2-dropout", fused=AS_PADDED),
        _case("neftune", "NEFTune's noise", config={"neftune_noise_alpha": 5.0}),
        _case("debug", "transformers' hooks look at all numbers", config={"debug": "underflow_overflow"}),
    ]


def adapters() -> list[Training]:
    checkpointing = {"gradient_checkpointing": True}

    def case(name: str, description: str, adapter: str, config: dict[str, Any] | None = None, **more: Any) -> Training:
        return _case(name, description, None, config, adapter=adapter, noise=0.02, **more)

    return [
        case("lora", "LoRA on the attention's projections", "attention"),
        case("lora-kl", "LoRA, beta with adapters disabled", "attention", KL),
        case("lora-dropout", "lora_dropout, TRL's padding", "dropout", fused=AS_PADDED),
        case("lora-dropout-checkpointing", "the same with checkpointing", "dropout", checkpointing, fused=AS_PADDED),
        case("alora", "aLoRA's invocation in every prompt", "alora"),
        case("prompt-tuning", "virtual tokens before each row", "prompt-tuning"),
        case("prefix-tuning", "virtual keys before each row", "prefix-tuning"),
        case("ia3", "IA3", "ia3"),
        case("head-copy", "modules_to_save of lm_head", "head-copy"),
        case("tied-copy", "modules_to_save tied by ensure_weight_tying", "tied-copy", model="tied"),
    ]
