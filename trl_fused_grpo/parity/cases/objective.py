"""Cases of the objective: loss types, importance ratios, KL, masks, entropy. A change of the loss belongs here."""

from typing import Any

from trl_fused_grpo.parity.case import DRIFTED, FAR, Batch, Case, Rollout


# (loss type, options it needs, first version of TRL, whether the ratio belongs to a token)
LOSS_TYPES: tuple[tuple[str, dict[str, Any], str | None, bool], ...] = (
    ("grpo", {}, None, True),
    ("bnpo", {}, None, True),
    ("dr_grpo", {}, None, True),
    ("dapo", {}, None, True),
    ("cispo", {"epsilon_high": 2.0}, None, True),
    ("sapo", {}, None, True),
    ("luspo", {"importance_sampling_level": "sequence"}, "0.28.0", False),
    ("vespo", {"vespo_k_pos": 2.0}, "1.0.0", False),
)


def loss_types() -> list[Case]:
    cases = []
    for name, options, min_trl, token_level in LOSS_TYPES:
        config = {"loss_type": name, **options}
        label = name.replace("_", "-")
        cases.append(Case(label, f"{name}, on-policy", config, min_trl=min_trl))
        cases.append(
            Case(
                f"{label}-off-policy",
                f"{name}, old log-probs given, part of the ratios clipped",
                config,
                FAR if token_level else DRIFTED,
                min_trl=min_trl,
            )
        )
    return cases


def importance_ratios() -> list[Case]:
    return [
        Case(
            "sequence-level",
            "sequence-level ratios, on-policy",
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        ),
        Case(
            "sequence-level-off-policy",
            "sequence-level ratios, old log-probs given",
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
            DRIFTED,
        ),
        Case(
            "sequence-level-dapo",
            "sequence-level ratios under dapo, old log-probs given",
            {"importance_sampling_level": "sequence"},
            DRIFTED,
        ),
        Case(
            "luspo-token",
            "luspo with token-level ratios",
            {"loss_type": "luspo"},
            FAR,
            min_trl="0.28.0",
            recomputed="any",  # before TRL 1.10 its mean includes padding
        ),
        Case("delta", "two-sided clipping", {"delta": 2.0}, FAR),
        Case("delta-grpo", "two-sided clipping under grpo", {"delta": 2.0, "loss_type": "grpo"}, FAR),
    ]


def advantages_and_temperature() -> list[Case]:
    return [
        Case("token-advantages", "advantages of shape [B, T]", {}, Batch(old="far", token_advantages=True)),
        Case("temperature", "temperature 0.7, on-policy", {"temperature": 0.7}),
        Case("temperature-off-policy", "temperature 1.3, old log-probs given", {"temperature": 1.3}, FAR),
    ]


def kl() -> list[Case]:
    return [
        Case("kl", "beta with reference log-probs given", {"beta": 0.1}, Batch(reference=True)),
        Case(
            "kl-grpo",
            "beta under grpo, old log-probs given",
            {"beta": 0.1, "loss_type": "grpo"},
            Batch(old="far", reference=True),
        ),
        Case(
            "kl-bias-corrected",
            "bias-corrected KL",
            {"beta": 0.1, "use_bias_correction_kl": True},
            Batch(old="far", reference=True),
        ),
        Case(
            "kl-reference-model",
            "beta with TRL's own forward of the reference model",
            {"beta": 0.1},
            Rollout(),
            noise=0.02,
        ),
        Case(
            "kl-adapters-disabled",
            "beta with PEFT adapters disabled for the reference forward",
            {"beta": 0.1},
            Rollout(),
            adapter="attention",
            noise=0.02,
        ),
    ]


def everything() -> list[Case]:
    return [
        Case(
            "everything",
            "vLLM ratios, tool mask, delta and bias-corrected KL together",
            {"beta": 0.1, "use_bias_correction_kl": True, "delta": 2.0},
            Batch(old="far", ratio="report", reference=True, tool_mask=True),
        )
    ]


_CLIP_BOUNDS = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
_TOKEN_TRUNCATE = {"vllm_importance_sampling_mode": "token_truncate", **_CLIP_BOUNDS}


def sampling_modes() -> list[Case]:
    return [
        Case(
            f"is-{level}-{action}",
            f"vLLM importance ratios, {level}_{action}, both clip bounds where TRL has both",
            {"vllm_importance_sampling_mode": f"{level}_{action}", **_CLIP_BOUNDS},
            Rollout(sampling=level),
        )
        for level in ("token", "sequence")
        for action in ("truncate", "mask")
    ]


_SEQUENCE_MASK = {"vllm_importance_sampling_mode": "sequence_mask", **_CLIP_BOUNDS}


def sampling_and_objectives() -> list[Case]:
    return [
        Case(
            "is-sequence-one-forward",
            "vLLM importance ratios of sequences, four micro-batches in one forward, truncated completions masked",
            {"gradient_accumulation_steps": 4, "mask_truncated_completions": True, **_SEQUENCE_MASK},
            Rollout(sampling="sequence", truncated_rows=(1, 4)),
            fused={"fused_max_tokens_per_forward": 10_000},
        ),
        Case(
            "is-sequence-kl",
            "vLLM importance ratios of sequences under grpo, bias-corrected KL, environment mask",
            {"beta": 0.1, "use_bias_correction_kl": True, "loss_type": "grpo", **_SEQUENCE_MASK},
            Rollout(sampling="sequence", env_mask=True),
            noise=0.02,
            min_trl="0.28.0",
        ),
        Case(
            "is-sequence-lora",
            "vLLM importance ratios of sequences with LoRA, whose head is frozen",
            _SEQUENCE_MASK,
            Rollout(sampling="sequence"),
            adapter="attention",
            noise=0.02,
        ),
        Case(
            "is-sequence-gspo",
            "vLLM importance ratios of sequences with sequence-level ratios and the off-policy mask",
            {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.0, **_SEQUENCE_MASK},
            Rollout(sampling="sequence"),
        ),
        Case(
            "is-token-grpo",
            "vLLM importance ratios under grpo, truncated completions masked",
            {"loss_type": "grpo", "mask_truncated_completions": True, **_TOKEN_TRUNCATE},
            Rollout(sampling="token", truncated_rows=(1, 4)),
        ),
        Case(
            "is-token-cispo",
            "vLLM importance ratios under cispo",
            {"loss_type": "cispo", "epsilon_high": 2.0, **_TOKEN_TRUNCATE},
            Rollout(sampling="token"),
        ),
        Case(
            "is-token-vespo",
            "vLLM importance ratios inside vespo's weights",
            {"loss_type": "vespo", "vespo_k_pos": 2.0, "mask_truncated_completions": True, **_TOKEN_TRUNCATE},
            Rollout(sampling="token", truncated_rows=(1, 4)),
        ),
        Case(
            "is-everything",
            "vLLM ratios, environment mask, delta and bias-corrected KL, all computed by TRL",
            {"beta": 0.1, "use_bias_correction_kl": True, "delta": 2.0, **_TOKEN_TRUNCATE},
            Rollout(sampling="token", env_mask=True),
            noise=0.02,
            min_trl="0.28.0",
        ),
    ]


def sampling_options() -> list[Case]:
    return [
        Case(
            "is-generation-above",
            "vLLM ratios, one generation batch over two optimizer steps",
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, **_TOKEN_TRUNCATE},
            Rollout(sampling="token"),
            accumulation_windows=2,
            update=True,
        ),
        Case(
            "is-off",
            "vLLM without the importance correction",
            {"vllm_importance_sampling_correction": False},
            Rollout(sampling="token"),
        ),
        Case(
            "is-nan",
            "sampler log-probs that are NaN: ratio 1",
            _TOKEN_TRUNCATE,
            Rollout("token", nan=True),
            min_trl="1.11.0",
        ),
    ]


def masks() -> list[Case]:
    return [
        Case("tool-mask", "tokens written by a tool have no loss", {}, Batch(old="far", tool_mask=True)),
        Case("env-mask", "tokens written by an environment have no loss", {}, Rollout(env_mask=True), min_trl="0.28.0"),
        Case(
            "truncated",
            "mask_truncated_completions: rows without a completion token",
            {"mask_truncated_completions": True},
            Rollout(truncated_rows=(1, 4)),
        ),
        Case("zero-length", "a completion of length zero", {}, Batch(old="far", empty_rows=(2,))),
        *(
            Case(
                f"all-masked-{loss_type}",
                f"a micro-batch without a token, {loss_type}",
                {"loss_type": loss_type, "gradient_accumulation_steps": 2},
                Batch(empty_micro_batches=(1,)),
            )
            for loss_type in ("dapo", "grpo")
        ),
        Case(
            "off-policy-mask",
            "off-policy sequence mask from old log-probs",
            {"off_policy_mask_threshold": 0.1},
            DRIFTED,
        ),
        Case(
            "off-policy-mask-sampling",
            "off-policy sequence mask from the sampler's log-probs",
            {"off_policy_mask_threshold": 0.1, "loss_type": "grpo"},
            Batch(old="far", sampling=True),
        ),
        Case(
            "top-entropy", "top-entropy quantile, on-policy", {"top_entropy_quantile": 0.37}, Batch(), recomputed="any"
        ),
        Case(
            "top-entropy-off-policy",
            "top-entropy quantile under bnpo, old log-probs and tool mask given",
            {"top_entropy_quantile": 0.37, "loss_type": "bnpo"},
            Batch(old="far", tool_mask=True),
            recomputed="any",
        ),
    ]


def entropy() -> list[Case]:
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 100.0}
    return [
        Case("entropy-bonus", "entropy bonus under dapo", {"entropy_coef": 0.1}, FAR),
        Case(
            "entropy-bonus-grpo",
            "entropy bonus under grpo, on-policy, with accumulation",
            {"entropy_coef": 0.1, "loss_type": "grpo", "gradient_accumulation_steps": 2},
        ),
        Case(
            "entropy-bonus-quantile",
            "entropy bonus on the top-entropy quantile",
            {"entropy_coef": 0.1, "top_entropy_quantile": 0.37},
            recomputed="any",
        ),
        Case(
            "entropy-adaptive",
            "adaptive entropy controller over two accumulation windows of two micro-batches",
            {**adaptive, "gradient_accumulation_steps": 2},
            accumulation_windows=2,
        ),
    ]
