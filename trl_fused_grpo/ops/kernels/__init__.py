"""
The two functions that read a chunk of logits: in Triton for CUDA (`triton`), in torch for every other device (`torch`).
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True)
class LogitTransform:
    """What happens to the raw logits (the head's output) before the softmax: scale, then softcap, then temperature."""

    logit_scale: float = 1.0  # Multiplier of the raw logits
    softcap: float | None = None  # `z` becomes `softcap * tanh(z / softcap)`
    temperature: float = 1.0  # Sampling temperature, which divides the logits


@functools.cache
def _triton_is_importable() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def why_not_triton(device: torch.device) -> str | None:
    """Why torch's operations run on a device in the place of Triton's kernels, or `None`."""
    if device.type != "cuda":
        return f"Triton's kernels are for CUDA, and the device is {device.type}"
    return None if _triton_is_importable() else "Triton is not installed"


def for_device(device: torch.device) -> ModuleType:
    """Return the kernel module for `device`: Triton on CUDA where it is installed, torch everywhere else."""
    name = "triton" if why_not_triton(device) is None else "torch"
    return importlib.import_module(f"{__name__}.{name}")
