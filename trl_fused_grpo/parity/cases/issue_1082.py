"""The cases of `--issue-1082`: one for each thing that stock TRL's Liger loss leaves out of the objective."""

from dataclasses import replace

from trl_fused_grpo.parity.case import Batch, Case


REPORT = Case(
    "issue-1082",
    "the bug report: dapo, vLLM importance ratios of mean 0.003 to 0.01",
    {"loss_type": "dapo"},
    Batch(old="policy", ratio="report"),
)

ISSUE_1082_CASES: tuple[Case, ...] = (
    replace(REPORT, name="issue-1082-ratio", description="vLLM's importance ratios, of mean 0.003 to 0.01"),
    Case(
        "issue-1082-normalizer",
        "the normalizer of the whole batch, where one of two micro-batches is masked",
        {"loss_type": "dapo", "gradient_accumulation_steps": 2},
        Batch(old="far", empty_micro_batches=(1,)),
    ),
    Case("issue-1082-tool-mask", "tokens written by a tool", {}, Batch(old="far", tool_mask=True)),
    Case(
        "issue-1082-kl",
        "bias-corrected KL",
        {"beta": 0.1, "use_bias_correction_kl": True},
        Batch(old="far", reference=True),
    ),
    Case("issue-1082-delta", "delta, the upper bound of the ratio", {"delta": 2.0}, Batch(old="far")),
    Case(
        "issue-1082-together",
        "ratio, tool mask and bias-corrected KL",
        {"beta": 0.1, "use_bias_correction_kl": True},
        Batch(old="far", ratio="report", reference=True, tool_mask=True),
    ),
)
