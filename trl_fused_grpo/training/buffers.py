"""
Buffers that forwards of a model change: running statistics, counters. What such a model computes depends on how many
forwards there were before, and on what each of them saw.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_fused_grpo._compat import torch as torch_compat


_KEEP_STATISTICS = (torch_compat.BatchNorm, torch_compat.InstanceNorm)


def changes_buffers(modules: list[nn.Module]) -> str | None:
    """What of torch's own among these modules changes its buffers in each forward, in words, or `None`."""
    if not any(map(_may_change_buffers, {*map(type, modules)})):  # thousands at every call of the model
        return None
    for module in modules:
        is_off = isinstance(module, _KEEP_STATISTICS) and not module.track_running_stats
        if module.training and module._buffers and _may_change_buffers(type(module)) and not is_off:
            return f"{type(module).__name__}, which changes its buffers in each forward,"
    return None


def _may_change_buffers(cls: type) -> bool:
    """Norms with running statistics, `spectral_norm`, and the observers of quantization-aware training."""
    return issubclass(cls, (*_KEEP_STATISTICS, torch_compat.SpectralNorm)) or cls.__module__.startswith("torch.ao.")


class Buffers:
    """
    The buffers of some modules, as they are now.

    Args:
        modules (`Iterable[nn.Module]`): they and what is in them.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        parts = {part: None for module in modules for part in torch_compat.modules_of(module)}
        self._modules = [part for part in parts if part._buffers]
        self._values = [dict(module._buffers) for module in self._modules]
        with torch.no_grad():
            self._copies = [{name: _copy(value) for name, value in values.items()} for values in self._values]
        self.count()

    def __len__(self) -> int:
        return len(self._modules)

    def count(self) -> None:
        """From now on [`changed`] tells what has changed since."""
        self._states = [_states(module) for module in self._modules]

    def changed(self) -> str | None:
        """The class of a module whose buffers were written or replaced since, or `None`."""
        pairs = zip(self._modules, self._states, strict=True)
        return next((type(module).__name__ for module, before in pairs if _states(module) != before), None)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the modules the buffers that they had, with the values that they had."""
        for module, values, copies in zip(self._modules, self._values, self._copies, strict=True):
            for name in [name for name in module._buffers if name not in values]:
                del module._buffers[name]
            for name, value in values.items():
                module._buffers[name] = value
                if value is not None and copies[name] is not None and not torch.equal(value, copies[name]):
                    value.copy_(copies[name])


def _copy(value: Tensor | None) -> Any:
    """A copy, but of matrices of integers: they are weights of quantized layers, which are large."""
    is_small = value is not None and (value.is_floating_point() or value.dim() < 2)
    return value.detach().clone() if is_small else None


def _states(module: nn.Module) -> dict[str, Any]:
    """Which tensors the buffers of a module are, and how often each was written."""
    return {name: (id(value), _times_written(value)) for name, value in module._buffers.items()}


def _times_written(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else value._version


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Generator[Buffers, None, None]:
    """Afterwards the buffers of some modules are what they were."""
    buffers = Buffers(modules)
    try:
        yield buffers
    finally:
        buffers.restore()
