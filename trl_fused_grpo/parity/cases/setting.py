"""
Cases of everything around the objective: kinds of model and adapter, gradient accumulation, when completions are
generated, evaluation.
"""

from typing import Any

from trl_fused_grpo.parity.case import FAR, Batch, Case, Rollout


def models() -> list[Case]:
    cast = {"cast_lm_head_to_fp32": True}
    return [
        Case("frozen-head", "output projection frozen, on-policy", frozen_head=True, head=True),
        Case(
            "frozen-head-off-policy",
            "output projection frozen, old log-probs given",
            {},
            FAR,
            frozen_head=True,
            head=True,
        ),
        Case("lora", "LoRA on the attention projections", {}, FAR, adapter="attention", noise=0.02),
        Case("tied", "tied embeddings, on-policy", model="tied", head=True),
        Case("tied-off-policy", "tied embeddings, old log-probs given", {}, FAR, model="tied", head=True),
        Case("cast-head", "cast_lm_head_to_fp32", cast, FAR, head=True),
        Case("cast-head-tied", "cast_lm_head_to_fp32, tied", cast, FAR, model="tied", head=True),
        Case(
            "moe",
            "Mixture-of-Experts, no auxiliary loss",
            {"router_aux_loss_coef": 0.0},
            FAR,
            model="moe",
            compare_bf16=False,
        ),
        Case("moe-aux-loss", "MoE auxiliary loss", {"router_aux_loss_coef": 0.5}, FAR, model="moe", compare_bf16=False),
        Case("checkpointing", "gradient checkpointing", {"gradient_checkpointing": True}, FAR),
    ]


def _steps(accumulation: int, generation: int, **options: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": accumulation, "steps_per_generation": generation, **options}


def accumulation() -> list[Case]:
    return [
        Case("accumulation", "four micro-batches of one generation batch", _steps(4, 4), Rollout()),
        Case(
            "accumulation-repeated-prompts",
            "the same with every copy of a prompt in the forward",
            _steps(4, 4),
            Rollout(),
            fused={"fused_share_prompts": False},
        ),
        Case(
            "accumulation-own-forwards",
            "the same with a forward for each micro-batch",
            _steps(4, 4),
            Rollout(),
            fused={"fused_max_tokens_per_forward": 0},
        ),
        Case(
            "accumulation-one-forward",
            "the same in one forward",
            _steps(4, 4),
            Rollout(),
            fused={"fused_max_tokens_per_forward": 10_000},
        ),
        Case(
            "accumulation-one-forward-bnpo",
            "the same under bnpo, which divides by the tokens of each micro-batch",
            _steps(4, 4, loss_type="bnpo", vllm_importance_sampling_mode="token_truncate"),
            Rollout(sampling="token"),
            fused={"fused_max_tokens_per_forward": 10_000},
        ),
    ]


def generation() -> list[Case]:
    return [
        Case("generation-below", "two generation batches in one accumulation window", _steps(4, 2), Rollout()),
        Case(
            "generation-above",
            "one generation batch over two optimizer steps",
            _steps(2, 4),
            Rollout(),
            accumulation_windows=2,
            update=True,
        ),
        Case(
            "generation-above-grpo",
            "the same under grpo, with truncated completions masked",
            _steps(2, 4, loss_type="grpo", mask_truncated_completions=True),
            Rollout(truncated_rows=(1, 4)),
            accumulation_windows=2,
            update=True,
        ),
        Case(
            "num-iterations",
            "num_iterations 2: the second iteration is off-policy",
            _steps(2, 2, num_iterations=2),
            Rollout(),
            accumulation_windows=2,
            update=True,
        ),
        Case("scale-rewards-batch", "rewards scaled over the batch", {"scale_rewards": "batch"}, Rollout()),
        Case("scale-rewards-none", "rewards not scaled", {"scale_rewards": "none"}, Rollout()),
    ]


def other_modes() -> list[Case]:
    return [
        Case("evaluation", "evaluation under dapo", {}, Batch(old="far", tool_mask=True), mode="eval"),
        Case("evaluation-rollout", "evaluation, rewards and advantages computed by TRL", {}, Rollout(), mode="eval"),
        Case(
            "log-probs",
            "the log-prob method without gradient, two rows at a time",
            {"temperature": 0.7},
            mode="log-probs",
        ),
        Case("wrong-forecast", "a wrong forecast costs time only", {}, FAR, recomputed="some", wrong_forecast=True),
    ]
