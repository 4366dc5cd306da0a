"""The table of a summary, and its lines about what is installed and what it runs on."""

import platform
import textwrap
from importlib import metadata
from typing import NamedTuple

import torch

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.ops.kernels import why_not_triton


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
    if TRL > NEWEST_TRL:
        reason = f"TRL {TRL} is newer than the newest that was tested ({NEWEST_TRL})"
        return SummaryLine("versions", value, reason, "run `trl-fused-grpo parity` before you rely on it")
    return SummaryLine("versions", value)


def device_line(device: torch.device, *others: str) -> SummaryLine:
    """A device, with what runs on it."""
    name = f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
    reason = why_not_triton(device)
    kernels = "torch's operations" if reason else "Triton's kernels"
    change = "pip install triton" if device.type == "cuda" else "train on a CUDA device"
    return SummaryLine("device", ", ".join((name, *others, kernels)), reason, change if reason else None)
