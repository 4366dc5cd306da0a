"""
What a training does and why not more: a verdict and a line for each part, which the trainer tells at the start of a
training and `trl-fused-grpo doctor` for a model and a configuration.
"""

import platform
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.required import NEWEST_TRL, TRANSFORMERS, TRL
from trl_fused_grpo._compat.tried_architectures import NEWEST_TRANSFORMERS
from trl_fused_grpo._utils import temporary_mode
from trl_fused_grpo.modeling.attention.kernels import efficient_takes, flash_takes
from trl_fused_grpo.modeling.head.output_projection import output_projection
from trl_fused_grpo.modeling.layers.compiled import layers_to_compile, why_not_compiled
from trl_fused_grpo.modeling.rows.layout_choice import why_not_packed, why_prompts_are_not_shared
from trl_fused_grpo.ops.kernels import why_not_triton
from trl_fused_grpo.ops.linear_logps import choose_backward

from .checks import why_base_weights_stay, why_not_checked
from .engine import LogpsEngine
from .findings import WHAT_IS_DONE, Level
from .memory import why_no_memory_budget
from .plan import (
    has_old_logps,
    why_forwards_are_not_shared,
    why_no_forecast,
    why_old_logps_are_needed,
    why_reference_is_not_regrouped,
)
from .requests import padding_counts


logger = logging.get_logger(__name__)

_HEAD = "fused head"
_MATMULS = {"frozen": "2 matmuls, frozen", "forecast": "3 matmuls, gradients come with the forward"}
PACKAGES = ("trl-fused-grpo", "trl", "transformers", "torch", "accelerate", "peft", "liger-kernel", "triton", "vllm")
_IN_SHORT = ("trl", "transformers", "torch")
# The head that torch's FlashAttention takes on every GPU of today, for a GPU that is not here
_USUAL_HEAD = 192


class SummaryLine(NamedTuple):
    """
    One part of a training.

    Args:
        name (`str`): the part.
        value (`str`): what is done.
        reason (`str`, *optional*): why nothing faster is; `None` where it is the fastest that there is.
        change (`str`, *optional*): what to change for it, where something can be changed.
    """

    name: str
    value: str
    reason: str | None = None
    change: str | None = None

    @property
    def text(self) -> str:
        """All but the name, as one sentence."""
        because = f", because {self.reason}" if self.reason else ""
        return f"{self.value}{because}" + (f". Change: {self.change}" if self.change else "")


class Summary(list[SummaryLine]):
    """The lines of a training, the verdict first; as a string, a table of them."""

    def __str__(self) -> str:
        width = max(len(line.name) for line in self) + 2
        options: Any = {"subsequent_indent": " " * width, "break_long_words": False, "break_on_hyphens": False}
        rows = [textwrap.wrap(f"{line.name:{width}}{line.text}", 118, **options) for line in self]
        return "\n".join(row for wrapped in rows for row in wrapped)


def versions() -> dict[str, str | None]:
    """The version of each package that matters here, and of Python; `None` for one that is not installed."""
    return {"python": platform.python_version(), **{package: _version_of(package) for package in PACKAGES}}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_line(packages: tuple[str, ...] = ("python", *PACKAGES)) -> SummaryLine:
    """Installed packages in one line."""
    found = versions()
    value = ", ".join(f"{name} {found[name]}" for name in packages if found[name])
    for name, version, newest in (("TRL", TRL, NEWEST_TRL), ("transformers", TRANSFORMERS, NEWEST_TRANSFORMERS)):
        if version > newest:
            reason = f"{name} {version} is newer than the newest that was tested ({newest})"
            return SummaryLine("versions", value, reason, "run `trl-fused-grpo parity` before you rely on it")
    return SummaryLine("versions", value)


def _is_elsewhere(device: torch.device) -> bool:
    """Return `True` if a device is a GPU, and this machine has none."""
    return device.type == "cuda" and not torch.cuda.is_available()


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return "cuda (not on this machine)" if _is_elsewhere(device) else f"cuda ({torch.cuda.get_device_name(device)})"


def device_line(device: torch.device) -> SummaryLine:
    """A device, and why it has no kernels."""
    reason = None if _is_elsewhere(device) else why_not_triton(device)
    change = "pip install triton" if device.type == "cuda" else "train on a CUDA device"
    return SummaryLine("device", _name_of(device), reason, change if reason else None)


def tell_summary(engine: LogpsEngine) -> None:
    """
    Tell the summary of a training on the main process: a table on a terminal, lines of the log elsewhere. Where only
    errors are logged, of this package or of transformers, nothing is told. No training ends because of it.
    """
    is_quiet = not logger.isEnabledFor(logging.WARNING) or logging.get_verbosity() > logging.WARNING
    if not engine.trainer.accelerator.is_main_process or is_quiet:
        return
    try:
        summary = summary_of(engine)
        if sys.stdout.isatty():
            print(summary, flush=True)
            return
        for line in summary:
            logger.warning(f"{line.name}: {line.text}")
    except Exception as error:  # a model that is like none before, or an output that takes no such text
        logger.warning(f"The summary of this training is left out, because {type(error).__name__}: {error}")


def summary_of(engine: LogpsEngine) -> Summary:
    """
    What the training of a constructed trainer does. The first line is the verdict; there are at most a dozen others.
    """
    trainer = engine.trainer
    name = "FusedRLOOTrainer" if trainers.is_rloo(trainer) else "FusedGRPOTrainer"
    setting = _setting(trainer)
    if not trainer.use_liger_loss:
        verdict = SummaryLine(name, "TRL's own loss", "use_liger_loss=False", "leave use_liger_loss out")
        return Summary([verdict, setting])
    findings = engine.ladder.findings
    with temporary_mode(trainer.model.modules(), True):  # as in a training step: dropout counts
        lines = _Lines(engine)
        parts, check = list(lines.all()), list(lines.check())
    is_on = WHAT_IS_DONE[findings.level]
    if findings.level >= Level.ROWS:
        # The head is fused without a forecast too
        is_on = ", ".join(part.name for part in parts if part.reason is None or part.name == _HEAD)
        off = ["forecast of the head" if part.name == _HEAD else part.name for part in parts if part.reason is not None]
        if engine.options.fused_memory is None and why_no_memory_budget(trainer) is None:
            off.append("fused_memory")  # off by default, and would act here
        is_on += f"; off: {', '.join(off)}" if off else ""
    summary = Summary([SummaryLine(name, f"level {findings.level.name.lower()}: {is_on}"), setting])
    if findings.reasons:
        found = "; ".join(f"{text} ({level.name.lower()})" for level, text, _ in findings.reasons)
        summary.append(SummaryLine("found", found))
    return Summary([*summary, *parts, *check])


def _setting(trainer: Any) -> SummaryLine:
    accelerator, dtype = trainer.accelerator, str(trainer.model.dtype).removeprefix("torch.")
    mixed = accelerator.mixed_precision
    precision = dtype if mixed in (None, "no") else f"{dtype} under {mixed}"
    processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    line = versions_line(_IN_SHORT)
    return line._replace(
        name="setting", value=", ".join((_name_of(accelerator.device), processes, precision, line.value))
    )


class _Lines:
    """The lines of a fused training: those without a reason are on."""

    def __init__(self, engine: LogpsEngine):
        self.engine, self.trainer, self.options = engine, engine.trainer, engine.options
        self.model, self.causal_lm = engine.unwrapped(engine.trainer.model), engine.causal_lm(engine.trainer.model)
        self.findings, self.device = engine.ladder.findings, engine.trainer.accelerator.device
        self.packed = engine.packs(engine.trainer.model, self.findings)
        self.is_elsewhere, self.level = _is_elsewhere(self.device), self.findings.level

    def all(self) -> Iterator[SummaryLine]:
        """Yield a line for each part of the training, in its order."""
        if self.level > Level.STOCK:
            yield self.head()
        yield from self.base_weights()
        if self.level < Level.ROWS:
            return
        yield self.rows()
        if self.packed:
            yield self.attention()
            yield self.layers()
        if self.trainer.args.gradient_accumulation_steps > 1:
            yield self.forwards()
        if has_old_logps(self.trainer):
            yield self.old_logps()
        if self.trainer.beta != 0.0:
            yield self.reference()

    def head(self) -> SummaryLine:
        name, asked, no_forecast = _HEAD, self.options.fused_backward, why_no_forecast(self.trainer)
        is_trained = any(parameter.requires_grad for parameter in output_projection(self.causal_lm).parameters())
        forecast: Any = object() if no_forecast is None else None
        mode = choose_backward(is_trained, forecast, trl_compat.has_entropy_bonus(self.trainer))
        if asked is not None and mode != "frozen":
            mode = asked
        if mode in _MATMULS:
            return SummaryLine(name, _MATMULS[mode])
        value = "4 matmuls, logits computed again"
        if asked == "recompute":
            return SummaryLine(name, value, "fused_backward='recompute'", "leave it out, if memory allows")
        reason, _, change = (no_forecast or "").partition(": ")
        return SummaryLine(name, value, reason or None, change or None)

    def rows(self) -> SummaryLine:
        name = "packed rows"
        if self.options.fused_layout == "padded":
            return SummaryLine(name, "padded as in TRL", "fused_layout='padded'", "leave fused_layout out")
        if not self.packed:
            reason = why_not_packed(self.model, self.causal_lm, padding_counts(self.trainer))
            return SummaryLine(name, "padded as in TRL", reason)
        alone = why_prompts_are_not_shared(self.causal_lm)
        if not self.options.fused_share_prompts:
            alone = "fused_share_prompts=False"
        once = "each prompt once" if alone is None else f"each completion with its prompt ({alone})"
        return SummaryLine(name, f"no padding, {once}")

    def attention(self) -> SummaryLine:
        config = self.causal_lm.config.get_text_config()
        name = model_compat.attention_implementation(config)
        line = SummaryLine("fast attention", name)
        if name in model_compat.flash_implementations():
            return line
        dtype = torch_compat.dtype_of_products(self.trainer.accelerator, self.causal_lm)
        device = "cpu" if self.is_elsewhere else self.device
        for width in sorted(model_compat.head_widths(config)):
            query = torch.empty(1, 1, 1, width, device=device, dtype=dtype)
            is_usual = self.is_elsewhere and dtype != torch.float32 and width <= _USUAL_HEAD
            if is_usual or flash_takes(query, query):
                continue
            reason = f"torch's FlashAttention does not take heads of {width} in {dtype} on {self.device.type}"
            if name == "sdpa" and (self.is_elsewhere or efficient_takes(query)):
                change = "bf16=True" if dtype == torch.float32 else None
                return line._replace(value=f"{name}, torch's memory-efficient attention", reason=reason, change=change)
            return line._replace(value=f"{name}, one sequence after the other", reason=reason)
        return line._replace(value=f"{name}, {torch_compat.flash_attention_name()} over all sequences at once")

    def forwards(self) -> SummaryLine:
        name, steps = "shared forwards", self.trainer.args.gradient_accumulation_steps
        tokens, fraction = self.options.fused_max_tokens_per_forward, self.options.fused_memory
        reason = why_forwards_are_not_shared(self.trainer, self.findings, self.packed)
        if tokens == 0:
            reason = "fused_max_tokens_per_forward=0"
        if reason is not None:
            return SummaryLine(name, "each micro-batch has its own", reason)
        limit = f"{tokens:,} tokens" if tokens else "as many tokens as fit TRL's memory"
        if fraction is not None and why_no_memory_budget(self.trainer) is None:
            limit = f"as many tokens as fit {fraction:.0%} of the memory, from the second step on"
        return SummaryLine(name, f"up to {steps} micro-batches in one, {limit}")

    def old_logps(self) -> SummaryLine:
        name, computed = "old log-probs of the training forward", "a forward of their own, where TRL has one"
        if self.options.fused_skip_old_logps is False:
            return SummaryLine(name, computed, "fused_skip_old_logps=False", "leave fused_skip_old_logps out")
        if (reason := why_old_logps_are_needed(self.trainer, self.findings)) is not None:
            return SummaryLine(name, computed, reason)
        args = self.trainer.args
        if args.gradient_accumulation_steps % args.steps_per_generation == 0:
            return SummaryLine(name, "until the weights move")
        change = "a steps_per_generation that divides gradient_accumulation_steps"
        return SummaryLine(name, "until the weights move", "they move before all is trained on", change)

    def reference(self) -> SummaryLine:
        reason = why_reference_is_not_regrouped(self.trainer, self.findings, self.packed)
        name = "shared reference forwards"
        return SummaryLine(name, "those of the policy" if reason is None else "in generation, as TRL has it", reason)

    def layers(self) -> SummaryLine:
        name, asked, change = "compiled layers", self.options.fused_compile, None
        # A GPU that is not here has Triton
        reason = None if self.is_elsewhere and asked is None else why_not_compiled(asked, self.device)
        if reason is None:
            reason = layers_to_compile(self.model)[1]
        elif asked is False:
            change = "leave fused_compile out"
        elif self.device.type == "cpu":
            change = "fused_compile=True, with a C++ compiler"
        return SummaryLine(name, "as they are" if reason else "one code for all layers of a kind", reason, change)

    def base_weights(self) -> Iterator[SummaryLine]:
        """Under adapters that are merged for vLLM, where that rounds them or would."""
        if why_base_weights_stay(self.trainer) is not None:
            return
        name, dtype = "base weights kept to the bit", str(self.model.dtype).removeprefix("torch.")
        if self.options.fused_keep_base_weights:
            yield SummaryLine(name, "when adapters are merged for vLLM")
        elif dtype in ("bfloat16", "float16"):
            reason = f"adapters are merged into {dtype} weights for vLLM, and taken out again"
            yield SummaryLine(name, "rounded at each step", reason, "fused_keep_base_weights=True")

    def check(self) -> Iterator[SummaryLine]:
        """The comparison with TRL's own path, if the log-probs are ours."""
        if self.level > Level.STOCK:
            every, reason = self.options.fused_verify, why_not_checked(self.trainer, self.findings, self.causal_lm)
            often = f", then every {every} optimizer steps" if every else ""
            yield SummaryLine("check", "none" if reason else f"log-probs of the first step beside TRL's{often}", reason)
