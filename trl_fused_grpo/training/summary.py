"""
What a training does and why not more: one table, which the trainer prints at the start of a training and
`trl-fused-grpo doctor` prints for a model and a configuration. It begins with the level and all findings.
"""

import platform
import textwrap
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.required import NEWEST_TRL, TRANSFORMERS, TRL
from trl_fused_grpo._compat.tried_architectures import NEWEST_TRANSFORMERS
from trl_fused_grpo.modeling.attention_kernels import efficient_takes, flash_takes
from trl_fused_grpo.modeling.compiled_layers import layers_to_compile
from trl_fused_grpo.modeling.kernels_in_layers import why_no_kernels
from trl_fused_grpo.modeling.layout_choice import why_not_packed, why_prompts_are_not_shared
from trl_fused_grpo.modeling.output_projection import output_projection
from trl_fused_grpo.ops.kernels import why_not_triton
from trl_fused_grpo.ops.linear_logps import choose_backward

from .check import why_not_checked
from .engine import LogpsEngine
from .findings import WHAT_IS_DONE, Level
from .loss_request import padding_counts
from .memory import MAX_TOKENS, MOST_OF_FIRST, gradient_memory, why_no_memory_budget
from .overrides import loss_type_of
from .plan import (
    has_old_logps,
    why_forwards_are_not_shared,
    why_no_forecast,
    why_not_exchanged,
    why_old_logps_are_needed,
    why_reference_is_not_regrouped,
    why_zero_grad_sequences_are_not_skipped,
)


logger = logging.get_logger(__name__)

_MATMULS = {"frozen": "2 matmuls, frozen head", "forecast": "3 matmuls, forecast in forward"}
_OFF = "it is off by default"
PACKAGES = ("trl-fused-grpo", "trl", "transformers", "torch", "accelerate", "peft", "liger-kernel", "triton", "vllm")


class SummaryLine(NamedTuple):
    """
    One thing that a training does.

    Args:
        name (`str`): what it is about.
        value (`str`): what is done.
        reason (`str`, *optional*): why nothing faster is; `None` where it is the fastest that there is.
        change (`str`, *optional*): what to change for it, where something can be changed.
    """

    name: str
    value: str
    reason: str | None = None
    change: str | None = None


class Summary(list[SummaryLine]):
    """The lines of a training; as a string, a table of them."""

    def __str__(self) -> str:
        width = max(len(line.name) for line in self) + 2
        rows = []
        for name, value, reason, change in self:
            because = f", because {reason}" if reason else ""
            text = f"{value}{because}" + (f". Change: {change}" if change else "")
            indent = " " * width
            rows += textwrap.wrap(
                f"{name:{width}}{text}", 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        return "\n".join(rows)


def versions() -> dict[str, str | None]:
    """The version of each package that matters here, and of Python; `None` for one that is not installed."""
    return {"python": platform.python_version(), **{package: _version_of(package) for package in PACKAGES}}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_line() -> SummaryLine:
    """The installed packages in one line."""
    value = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    for name, version, newest in (("TRL", TRL, NEWEST_TRL), ("transformers", TRANSFORMERS, NEWEST_TRANSFORMERS)):
        if version > newest:
            reason = f"{name} {version} is newer than the newest that was tested ({newest})"
            return SummaryLine("versions", value, reason, "run `trl-fused-grpo parity` before you rely on it")
    return SummaryLine("versions", value)


def device_line(device: torch.device, *others: str) -> SummaryLine:
    """A device, with what runs on it."""
    name = f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
    reason = why_not_triton(device)
    kernels = "torch's operations" if reason else "Triton's kernels"
    change = "pip install triton" if device.type == "cuda" else "train on a CUDA device"
    return SummaryLine("device", ", ".join((name, *others, kernels)), reason, change if reason else None)


def print_summary(engine: LogpsEngine) -> None:
    """
    Print the summary of a training on the main process. Where only errors are logged, of this package or of
    transformers, nothing is printed. No training ends because of it.
    """
    is_quiet = not logger.isEnabledFor(logging.WARNING) or logging.get_verbosity() > logging.WARNING
    if not engine.trainer.accelerator.is_main_process or is_quiet:
        return
    try:
        name = "FusedRLOOTrainer" if trainers.is_rloo(engine.trainer) else "FusedGRPOTrainer"
        print(f"What {name} does in this training:\n{summary_of(engine)}", flush=True)
    except Exception as error:  # a model that is like none before, or an output that takes no such text
        logger.warning(f"The summary of this training is left out, because {type(error).__name__}: {error}")


def summary_of(engine: LogpsEngine) -> Summary:
    """
    What the training of a constructed trainer does.

    Args:
        engine ([`LogpsEngine`]): of the trainer.

    Raises:
        `ValueError`: when a layout was asked for that the model does not take.
    """
    trainer = engine.trainer
    accelerator, dtype = trainer.accelerator, str(trainer.model.dtype).removeprefix("torch.")
    mixed = accelerator.mixed_precision
    precision = dtype if mixed in (None, "no") else f"{dtype} under {mixed}"
    processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    lines = Summary([versions_line(), device_line(accelerator.device, processes, precision)])
    if not trainer.use_liger_loss:
        return Summary([*lines, SummaryLine("loss", "TRL's own path", "use_liger_loss is off", "use_liger_loss=True")])
    return Summary([*lines, *_Lines(engine).all()])


class _Lines:
    """The lines of a fused training."""

    def __init__(self, engine: LogpsEngine):
        self.engine, self.trainer, self.options = engine, engine.trainer, engine.options
        self.model, self.causal_lm = engine.unwrapped(engine.trainer.model), engine.causal_lm(engine.trainer.model)
        self.packed = engine.packs(engine.trainer.model)

    def all(self) -> Iterator[SummaryLine]:
        """The lines: level and findings, then what is done at that level, in the order of a training."""
        findings = self.trainer._fused.ladder.findings
        yield SummaryLine("level", f"{findings.level.name.lower()}: {WHAT_IS_DONE[findings.level]}")
        for level, text, _ in findings.reasons:
            yield SummaryLine(f"found ({level.name.lower()})", text)
        yield SummaryLine("loss", f"TRL's own ({loss_type_of(self.trainer)})")
        if findings.level == Level.STOCK:
            return
        yield self.backward()
        if findings.level == Level.HEAD:
            yield self.verification()
            return
        yield self.rows()
        yield self.attention()
        yield self.prompts()
        yield self.forwards()
        yield self.old_logps()
        yield self.reference()
        if self.trainer.accelerator.num_processes > 1:
            yield self.exchange()
        lora = self.lora()
        if lora is not None:
            yield lora
        yield from (self.kernels(), self.memory(), self.zero_grad(), self.verification())

    def backward(self) -> SummaryLine:
        asked, no_forecast = self.options.fused_backward, why_no_forecast(self.trainer)
        is_trained = any(parameter.requires_grad for parameter in output_projection(self.causal_lm).parameters())
        forecast: Any = object() if no_forecast is None else None
        mode = choose_backward(is_trained, forecast, trl_compat.has_entropy_bonus(self.trainer))
        if asked != "auto" and mode != "frozen":
            mode = asked
        if mode in _MATMULS:
            return SummaryLine("backward of the head", _MATMULS[mode])
        value = "4 matmuls, logits computed again"
        if asked == "recompute":
            return SummaryLine(
                "backward of the head", value, "fused_backward='recompute'", "fused_backward='auto', if memory allows"
            )
        reason, _, change = (no_forecast or "").partition(": ")
        return SummaryLine("backward of the head", value, reason, change)

    def rows(self) -> SummaryLine:
        name = "layout"
        if self.options.forces_rows:
            return SummaryLine(name, "packed, as asked for")
        if self.packed:
            return SummaryLine(name, "packed: no padding")
        if self.options.fused_layout == "padded":
            return SummaryLine(name, "padded, as asked for", "fused_layout='padded'", "fused_layout='auto'")
        return SummaryLine(name, "padded", why_not_packed(self.model, self.causal_lm, padding_counts(self.trainer)))

    def attention(self) -> SummaryLine:
        config = self.causal_lm.config.get_text_config()
        name, device = model_compat.attention_implementation(config), self.trainer.accelerator.device
        if not self.packed:
            return SummaryLine("attention", f"{name}, as in stock")
        if name in model_compat.flash_implementations():
            return SummaryLine("attention", f"{name}, over all sequences at once")
        dtype = torch_compat.dtype_of_products(self.trainer.accelerator, self.causal_lm)
        queries = [torch.empty(1, 1, 1, n, device=device, dtype=dtype) for n in model_compat.head_widths(config)]
        too_wide = [query for query in queries if not flash_takes(query, query)]
        if not too_wide:
            return SummaryLine(
                "attention", f"{name}, by {torch_compat.flash_attention_name()} over all sequences at once"
            )
        reason = f"torch's FlashAttention does not take heads of {too_wide[0].shape[-1]} in {dtype} on {device.type}"
        if name == "sdpa" and efficient_takes(too_wide[0]):
            change = "bf16=True" if dtype == torch.float32 else None
            return SummaryLine("attention", f"{name}, by torch's memory-efficient attention", reason, change)
        return SummaryLine("attention", f"{name}, one sequence after the other", reason)

    def prompts(self) -> SummaryLine:
        reason = why_prompts_are_not_shared(self.causal_lm) if self.packed else "rows are padded"
        if not self.options.fused_share_prompts:
            reason = "fused_share_prompts=False"
        return SummaryLine("prompts", "once for all of their completions" if reason is None else "once each", reason)

    def forwards(self) -> SummaryLine:
        name, steps = "forwards", self.trainer.args.gradient_accumulation_steps
        tokens, alone = self.options.fused_max_tokens_per_forward, "each micro-batch has its own"
        if steps == 1:
            return SummaryLine(name, "one micro-batch in an accumulation window")
        reason = (
            "fused_max_tokens_per_forward=0" if tokens == 0 else why_forwards_are_not_shared(self.trainer, self.packed)
        )
        if reason is not None:
            return SummaryLine(name, alone, reason)
        limit = f"{tokens:,}" if tokens else f"as many as TRL's padded micro-batch, at most {MAX_TOKENS:,}"
        more = gradient_memory(self.trainer, self.causal_lm, self.packed).most_tokens
        if not tokens and more and self.engine.memory is None:
            limit += f"; in the first of a window up to {more:,} more, at most {MOST_OF_FIRST:,}"
        return SummaryLine(name, f"shared by up to {steps} micro-batches, tokens: {limit}")

    def old_logps(self) -> SummaryLine:
        name, computed = "old log-probs", "a forward of their own, where TRL has one"
        if not has_old_logps(self.trainer):
            return SummaryLine(name, "none: no weight moves while a generation batch is in use")
        if self.options.fused_skip_old_logps is False:
            return SummaryLine(name, computed, "fused_skip_old_logps=False", "fused_skip_old_logps=None")
        if (reason := why_old_logps_are_needed(self.trainer)) is not None:
            return SummaryLine(name, computed, reason)
        what, args = "from the training forward, where no weight has moved since generation", self.trainer.args
        if args.gradient_accumulation_steps % args.steps_per_generation == 0:
            return SummaryLine(name, what)
        change = "a steps_per_generation that divides gradient_accumulation_steps"
        return SummaryLine(name, what, "weights move before all of a generation batch is trained on", change)

    def reference(self) -> SummaryLine:
        if self.trainer.beta == 0.0:
            return SummaryLine("reference", "none (beta=0.0)")
        reason = why_reference_is_not_regrouped(self.trainer, self.packed)
        if reason is None:
            return SummaryLine("reference", "in the same forwards as the policy")
        return SummaryLine("reference", "during generation, as TRL has it", reason)

    def exchange(self) -> SummaryLine:
        name, kept = "exchange", "each process keeps its sequences"
        if self.options.fused_balance is False:
            return SummaryLine(name, kept, "fused_balance=False", "fused_balance=None")
        means = not self.options.fused_balance
        reason = why_not_exchanged(self.trainer, self.causal_lm, self.packed, counts_means=means)
        return SummaryLine(name, kept, reason) if reason else SummaryLine(name, "processes have about equal work")

    def lora(self) -> SummaryLine | None:
        cls = peft_compat.lora_linear_class()
        layers: list[Any] = [module for module in self.model.modules() if cls is not None and type(module) is cls]
        if not layers:
            return None
        if not self.options.fused_lora:
            return SummaryLine("LoRA", "PEFT's own products", "fused_lora=False", "fused_lora=True")
        return SummaryLine("LoRA", "within the products of the layers that carry it")

    def kernels(self) -> SummaryLine:
        name, off = "layers", "the model's own operations"
        if self.options.fused_compile and layers_to_compile(self.model)[1] is None:
            return SummaryLine(name, "compiled, as far as torch can, where rows are packed")
        if not self.options.fused_kernels:
            return SummaryLine(name, off, "fused_kernels=False", "fused_kernels=True")
        reason = why_no_kernels(self.model, self.trainer.accelerator.device)
        if reason is not None:
            return SummaryLine(name, off, reason)
        return SummaryLine(name, "norms, MLPs and rotary embeddings in a kernel each, where they have one")

    def memory(self) -> SummaryLine:
        fraction, reason = self.options.fused_memory, why_no_memory_budget(self.trainer)
        if fraction is not None and reason is None:
            return SummaryLine(
                "memory", f"up to {fraction:.0%} of the device's for larger forwards, from the second step on"
            )
        change = "fused_memory=0.9, if the device is free" if reason is None else None
        return SummaryLine("memory", "as TRL's padded rows would take", reason or _OFF, change)

    def zero_grad(self) -> SummaryLine:
        name, reason = "zero-grad sequences", why_zero_grad_sequences_are_not_skipped(self.trainer, self.packed)
        if self.options.fused_skip_zero_grad_sequences and reason is None:
            return SummaryLine(name, "left out of the model")
        change = "fused_skip_zero_grad_sequences=True; `entropy` then covers the others" if reason is None else None
        return SummaryLine(name, "in the model", reason or _OFF, change)

    def verification(self) -> SummaryLine:
        every, reason = self.options.fused_verify, why_not_checked(self.trainer, self.causal_lm)
        often = f", then every {every} optimizer steps" if every else ""
        value = "none" if reason else f"log-probs of the first step beside TRL's own{often}"
        return SummaryLine("check", value, reason)
