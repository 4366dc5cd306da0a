"""
The named cases, all that TRL's own GRPO path supports. A case is data; add one beside those of its topic.

- `CASES`: the objective, the model, accumulation and generation
- `MODEL_CASES` (`--models`): one for each model family, and one for each kind of output projection
- `ISSUE_1082_CASES` (`--issue-1082`): one for each thing that stock TRL's Liger loss leaves out of the objective
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trl_fused_grpo._compat import trl as trl_compat

from .case import Batch, Case, Rollout
from .tiny.families import FAMILIES, Family


# Data
FAR, DRIFTED = Batch(old="far"), Batch(old="drifted")
FAR_TOOL_MASK = Batch(old="far", tool_mask=True)
FAR_REFERENCE = Batch(old="far", reference=True)
FAR_EVERYTHING = Batch(old="far", ratio="report", reference=True, tool_mask=True)
REPORTED = Batch(old="policy", ratio="report")
GENERATED = Rollout()
TOKENS, SEQUENCES = Rollout(sampling="token"), Rollout(sampling="sequence")
TRUNCATED = Rollout(truncated_rows=(1, 4))
TRUNCATED_TOKENS = replace(TRUNCATED, sampling="token")
ONE_EMPTY = Batch(empty_micro_batches=(1,))

# Options
DAPO, GRPO = {"loss_type": "dapo"}, {"loss_type": "grpo"}
CISPO = {"loss_type": "cispo", "epsilon_high": 2.0}
LUSPO = {"loss_type": "luspo"}
VESPO = {"loss_type": "vespo", "vespo_k_pos": 2.0}
SEQUENCE_LEVEL = {"importance_sampling_level": "sequence"}
DELTA = {"delta": 2.0}
KL = {"beta": 0.1}
CORRECTED_KL = {**KL, "use_bias_correction_kl": True}
MASKED = {"mask_truncated_completions": True}
QUANTILE = {"top_entropy_quantile": 0.37}
ENTROPY = {"entropy_coef": 0.1}
ADAPTIVE_ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 100.0}
CAST = {"cast_lm_head_to_fp32": True}
MODE = "vllm_importance_sampling_mode"
BOUNDS = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2}

# Fields of a case
TWO_WINDOWS: dict[str, Any] = {"accumulation_windows": 2, "update": True}
LORA: dict[str, Any] = {"adapter": "attention", "noise": 0.02}
ONE_FORWARD = {"fused_max_tokens_per_forward": 10_000}
NOISE = 0.05  # families initialize biases and norms to constants, which hide errors
ENV_MASK = "0.28.0"  # the first TRL that has it

REPORT = Case("issue-1082", "the bug report: dapo, vLLM importance ratios of mean 0.003 to 0.01", DAPO, REPORTED)


def _steps(accumulation: int, generation: int, **options: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": accumulation, "steps_per_generation": generation, **options}


# (loss type, options it needs, first version of TRL, whether the ratio belongs to a token)
LOSS_TYPES: tuple[tuple[str, dict[str, Any], str | None, bool], ...] = (
    ("grpo", {}, None, True),
    ("bnpo", {}, None, True),
    ("dr_grpo", {}, None, True),
    ("dapo", {}, None, True),
    ("cispo", CISPO, None, True),
    ("sapo", {}, None, True),
    ("luspo", SEQUENCE_LEVEL, "0.28.0", False),
    ("vespo", VESPO, "1.0.0", False),
)


def _loss_types() -> Iterator[Case]:
    for name, options, min_trl, token_level in LOSS_TYPES:
        config, label = {**options, "loss_type": name}, name.replace("_", "-")
        given = f"{name}, old log-probs given, part of the ratios clipped"
        yield Case(label, f"{name}, on-policy", config, min_trl=min_trl)
        yield Case(f"{label}-off-policy", given, config, FAR if token_level else DRIFTED, min_trl=min_trl)


_OBJECTIVE = (
    # Importance ratios
    Case("sequence-level", "sequence-level ratios, on-policy", {**SEQUENCE_LEVEL, **GRPO}),
    Case(
        "sequence-level-off-policy", "sequence-level ratios, old log-probs given", {**SEQUENCE_LEVEL, **GRPO}, DRIFTED
    ),
    Case("sequence-level-dapo", "sequence-level ratios under dapo, old log-probs given", SEQUENCE_LEVEL, DRIFTED),
    # Before TRL 1.10 its mean includes padding: then there is no forecast
    Case("luspo-token", "luspo with token-level ratios", LUSPO, FAR, min_trl="0.28.0", recomputed="any"),
    Case("delta", "two-sided clipping", DELTA, FAR),
    Case("delta-grpo", "two-sided clipping under grpo", {**DELTA, **GRPO}, FAR),
    # Advantages and temperature
    Case("token-advantages", "advantages of shape [B, T]", {}, Batch(old="far", token_advantages=True)),
    Case("temperature", "temperature 0.7, on-policy", {"temperature": 0.7}),
    Case("temperature-off-policy", "temperature 1.3, old log-probs given", {"temperature": 1.3}, FAR),
    # KL
    Case("kl", "beta with reference log-probs given", KL, Batch(reference=True)),
    Case("kl-grpo", "beta under grpo, old log-probs given", {**KL, **GRPO}, FAR_REFERENCE),
    Case("kl-bias-corrected", "bias-corrected KL", CORRECTED_KL, FAR_REFERENCE),
    Case("kl-reference-model", "beta with TRL's own forward of the reference model", KL, GENERATED, noise=0.02),
    Case("kl-adapters-disabled", "beta with PEFT adapters disabled for the reference forward", KL, GENERATED, **LORA),
    Case("everything", "vLLM ratios, tool mask, delta, bias-corrected KL", {**CORRECTED_KL, **DELTA}, FAR_EVERYTHING),
)


def _vllm(name: str, about: str, options: dict[str, Any], data: Rollout, **fields: Any) -> Case:
    """A case of vLLM's importance ratios. Without a mode among the options, it is one that fits the data."""
    mode = "token_truncate" if data.sampling == "token" else "sequence_mask"
    config = {MODE: mode, **BOUNDS, **options}
    return Case(f"is-{name}", f"vLLM importance ratios{about}", config, data, **fields)


BOTH = "both clip bounds where TRL has both"
_SAMPLING = (
    _vllm("token-truncate", f", token_truncate, {BOTH}", {}, TOKENS),
    _vllm("token-mask", f", token_mask, {BOTH}", {MODE: "token_mask"}, TOKENS),
    _vllm("sequence-truncate", f", sequence_truncate, {BOTH}", {MODE: "sequence_truncate"}, SEQUENCES),
    _vllm("sequence-mask", f", sequence_mask, {BOTH}", {}, SEQUENCES),
    _vllm(
        "sequence-one-forward",
        " of sequences, four micro-batches in one forward, truncated completions masked",
        {**MASKED, "gradient_accumulation_steps": 4},
        replace(TRUNCATED, sampling="sequence"),
        fused=ONE_FORWARD,
    ),
    _vllm(
        "sequence-kl",
        " of sequences under grpo, bias-corrected KL, environment mask",
        {**CORRECTED_KL, **GRPO},
        Rollout(sampling="sequence", env_mask=True),
        noise=0.02,
        min_trl=ENV_MASK,
    ),
    _vllm("sequence-lora", " of sequences with LoRA, whose head is frozen", {}, SEQUENCES, **LORA),
    _vllm(
        "sequence-gspo",
        " of sequences with sequence-level ratios and the off-policy mask",
        {**SEQUENCE_LEVEL, "off_policy_mask_threshold": 0.0},
        SEQUENCES,
    ),
    _vllm("token-grpo", " under grpo, truncated completions masked", {**GRPO, **MASKED}, TRUNCATED_TOKENS),
    _vllm("token-cispo", " under cispo", CISPO, TOKENS),
    _vllm("token-vespo", " inside vespo's weights", {**VESPO, **MASKED}, TRUNCATED_TOKENS),
    _vllm(
        "everything",
        ", environment mask, delta and bias-corrected KL, all computed by TRL",
        {**CORRECTED_KL, **DELTA},
        Rollout(sampling="token", env_mask=True),
        noise=0.02,
        min_trl=ENV_MASK,
    ),
    _vllm("generation-above", ", one generation batch over two optimizer steps", _steps(2, 4), TOKENS, **TWO_WINDOWS),
    Case("is-off", "vLLM without the importance correction", {"vllm_importance_sampling_correction": False}, TOKENS),
    _vllm("nan", " of 1 where the sampler's log-probs are NaN", {}, Rollout("token", nan=True), min_trl="1.11.0"),
)

_MASKS_AND_ENTROPY = (
    Case("tool-mask", "tokens written by a tool have no loss", {}, FAR_TOOL_MASK),
    Case("env-mask", "tokens written by an environment have no loss", {}, Rollout(env_mask=True), min_trl=ENV_MASK),
    Case("truncated", "mask_truncated_completions: rows without a completion token", MASKED, TRUNCATED),
    Case("zero-length", "a completion of length zero", {}, Batch(old="far", empty_rows=(2,))),
    Case("all-masked-dapo", "a micro-batch without a token, dapo", {**DAPO, **TWO_MICRO_BATCHES}, ONE_EMPTY),
    Case("all-masked-grpo", "a micro-batch without a token, grpo", {**GRPO, **TWO_MICRO_BATCHES}, ONE_EMPTY),
    Case("off-policy-mask", "off-policy sequence mask from old log-probs", {"off_policy_mask_threshold": 0.1}, DRIFTED),
    Case(
        "off-policy-mask-sampling",
        "off-policy sequence mask from the sampler's log-probs",
        {**GRPO, "off_policy_mask_threshold": 0.1},
        Batch(old="far", sampling=True),
    ),
    Case("top-entropy", "top-entropy quantile, on-policy", QUANTILE, recomputed="any"),
    Case(
        "top-entropy-off-policy",
        "top-entropy quantile under bnpo, old log-probs and tool mask given",
        {**QUANTILE, "loss_type": "bnpo"},
        FAR_TOOL_MASK,
        recomputed="any",
    ),
    Case("entropy-bonus", "entropy bonus under dapo", ENTROPY, FAR),
    Case(
        "entropy-bonus-grpo",
        "entropy bonus under grpo, on-policy, with accumulation",
        {**ENTROPY, **GRPO, **TWO_MICRO_BATCHES},
    ),
    Case(
        "entropy-bonus-quantile", "entropy bonus on the top-entropy quantile", {**ENTROPY, **QUANTILE}, recomputed="any"
    ),
    Case(
        "entropy-adaptive",
        "adaptive entropy controller over two accumulation windows of two micro-batches",
        {**ADAPTIVE_ENTROPY, **TWO_MICRO_BATCHES},
        accumulation_windows=2,
    ),
)

_MODELS = (
    Case("frozen-head", "output projection frozen, on-policy", frozen_head=True, head=True),
    Case(
        "frozen-head-off-policy", "output projection frozen, old log-probs given", {}, FAR, frozen_head=True, head=True
    ),
    Case("lora", "LoRA on the attention projections", {}, FAR, **LORA),
    Case("tied", "tied embeddings, on-policy", model="tied", head=True),
    Case("tied-off-policy", "tied embeddings, old log-probs given", {}, FAR, model="tied", head=True),
    Case("cast-head", "cast_lm_head_to_fp32", CAST, FAR, head=True),
    Case("cast-head-tied", "cast_lm_head_to_fp32, tied", CAST, FAR, model="tied", head=True),
    Case("moe", "MoE, no auxiliary loss", {"router_aux_loss_coef": 0.0}, FAR, model="moe", compare_bf16=False),
    Case("moe-aux-loss", "MoE auxiliary loss", {"router_aux_loss_coef": 0.5}, FAR, model="moe", compare_bf16=False),
    Case("checkpointing", "gradient checkpointing", {"gradient_checkpointing": True}, FAR),
)

_ACCUMULATION_AND_GENERATION = (
    Case("accumulation", "four micro-batches of one generation batch", _steps(4, 4), GENERATED),
    *(
        Case(f"accumulation-{name}", f"the same {about}", _steps(4, 4), GENERATED, fused=fused)
        for name, about, fused in (
            ("repeated-prompts", "with every copy of a prompt in the forward", {"fused_share_prompts": False}),
            ("own-forwards", "with a forward for each micro-batch", {"fused_max_tokens_per_forward": 0}),
            ("one-forward", "in one forward", ONE_FORWARD),
        )
    ),
    Case(
        "accumulation-one-forward-bnpo",
        "the same under bnpo, which divides by the tokens of each micro-batch",
        _steps(4, 4, loss_type="bnpo", **{MODE: "token_truncate"}),
        TOKENS,
        fused=ONE_FORWARD,
    ),
    Case("generation-below", "two generation batches in one accumulation window", _steps(4, 2), GENERATED),
    Case("generation-above", "one generation batch over two optimizer steps", _steps(2, 4), GENERATED, **TWO_WINDOWS),
    Case(
        "generation-above-grpo",
        "the same under grpo, with truncated completions masked",
        _steps(2, 4, **GRPO, **MASKED),
        TRUNCATED,
        **TWO_WINDOWS,
    ),
    Case(
        "num-iterations",
        "num_iterations 2: the second iteration is off-policy",
        _steps(2, 2, num_iterations=2),
        GENERATED,
        **TWO_WINDOWS,
    ),
    Case("scale-rewards-batch", "rewards scaled over the batch", {"scale_rewards": "batch"}, GENERATED),
    Case("scale-rewards-none", "rewards not scaled", {"scale_rewards": "none"}, GENERATED),
)

_OTHER_MODES = (
    Case("evaluation", "evaluation under dapo", {}, FAR_TOOL_MASK, mode="eval"),
    Case("evaluation-rollout", "evaluation, rewards and advantages computed by TRL", {}, GENERATED, mode="eval"),
    Case(
        "log-probs", "the log-prob method without gradient, two rows at a time", {"temperature": 0.7}, mode="log-probs"
    ),
    Case("wrong-forecast", "a wrong forecast costs time only", {}, FAR, recomputed="some", wrong_forecast=True),
)

CASES: tuple[Case, ...] = (
    REPORT,
    *_loss_types(),
    *_OBJECTIVE,
    *_SAMPLING,
    *_MASKS_AND_ENTROPY,
    *_MODELS,
    *_ACCUMULATION_AND_GENERATION,
    *_OTHER_MODES,
)


def _families() -> Iterator[Case]:
    """Of each family; one with images has a case with them and one, named `-text`, without."""
    for name, family in FAMILIES.items():
        if family.images is not None:
            yield _of_family(name, name, family, family.images)
        yield _of_family(f"{name}-text" if family.images else name, name, family, None)


def _of_family(name: str, model: str, family: Family, images: str | None) -> Case:
    aux_loss = "auxiliary loss"
    about = (
        family.config.removesuffix("Config"),
        (aux_loss if trl_compat.RETURNS_AUX_LOSS else f"this TRL adds no {aux_loss}") if family.has_aux_loss else "",
        f"logits times {family.scale:g}" if family.scale != 1.0 else "",
        "softcap" if family.softcap else "",
        ("images" if images else "text alone") if family.images else "",
    )
    return Case(
        name,
        ", ".join(filter(None, about)),
        {"router_aux_loss_coef": 0.3 if family.has_aux_loss else 0.0} if trl_compat.RETURNS_AUX_LOSS else {},
        Batch(old="far", images=images, repeated_prompts=True),
        model=model,
        frozen=family.flat,
        noise=NOISE,
        stock_fails=family.stock_fails,
        compare_bf16=not family.has_aux_loss,
        # Of a text model that another family lends, Liger replaces the layers for the whole process, unasked
        compare_liger="model_type" not in family.options,
    )


FAMILY_CASES: tuple[Case, ...] = tuple(_families())
_WARM = {"temperature": 0.7}
MODEL_CASES: tuple[Case, ...] = (
    *FAMILY_CASES,
    *(case for case in CASES if case.head),
    Case("head-bias", "bias (Phi)", {}, FAR, model="biased", noise=NOISE),
    Case("head-logit-scale", "logit scale under temperature 0.7 (Cohere)", _WARM, FAR, model="scaled", noise=NOISE),
    Case("head-softcap", "softcap under temperature 0.7 (Gemma3)", _WARM, FAR, model="gemma3", noise=NOISE),
    Case("head-vocabulary", "vocabulary larger than the tokenizer's", {}, FAR, model="wide"),
    Case("head-modules-to-save", 'modules_to_save=["lm_head"]', {}, FAR, adapter="head-copy", noise=0.02),
    Case(
        "head-lora", "LoRA on lm_head; against dense logits where TRL refuses it", {}, FAR, adapter="head", noise=0.02
    ),
)

ISSUE_1082_CASES: tuple[Case, ...] = (
    replace(REPORT, name="issue-1082-ratio", description="vLLM's importance ratios, of mean 0.003 to 0.01"),
    Case(
        "issue-1082-normalizer",
        "the normalizer of the whole batch, where one of two micro-batches is masked",
        {**DAPO, **TWO_MICRO_BATCHES},
        replace(ONE_EMPTY, old="far"),
    ),
    Case("issue-1082-tool-mask", "tokens written by a tool", {}, FAR_TOOL_MASK),
    Case("issue-1082-kl", "bias-corrected KL", CORRECTED_KL, FAR_REFERENCE),
    Case("issue-1082-delta", "delta, the upper bound of the ratio", DELTA, FAR),
    Case("issue-1082-together", "ratio, tool mask and bias-corrected KL", CORRECTED_KL, FAR_EVERYTHING),
)
