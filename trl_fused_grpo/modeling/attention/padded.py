"""
Attention over rows with TRL's padding, whose first queries have no key to attend to.

cuDNN's attention, one of SDPA's kernels, returns NaN gradients for such queries at some widths. They stand in padding,
and no token of a sequence attends to them, so that they may attend to anything: masks that transformers builds are
opened for them. Where a model builds its masks by itself, or lets padding into its sequences otherwise than by
attention, SDPA does not take cuDNN's kernel.
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trl_fused_grpo.ops.linear_logps import FusedStats

from .packed import watched_call
from .watch import WatchedCall


# Models whose masks were seen to come from transformers
_MASKS_ARE_SEEN: WeakSet[nn.Module] = WeakSet()


@contextmanager
def cudnn_attention_off() -> Generator[None, None, None]:
    """
    While it lasts, SDPA does not take cuDNN's kernel. A backward that computes checkpointed layers again needs it too.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def padded_call(model: nn.Module, opens_masks: bool, stats: FusedStats) -> Generator[None, None, None]:
    """
    While it lasts, a forward over padded rows is safe from NaN gradients; its `stats` say what its backward must not
    take. Without a gradient or CUDA nothing happens.
    """
    if not (torch.is_grad_enabled() and torch.cuda.is_initialized()):
        yield
        return
    enabled = torch.backends.cuda.cudnn_sdp_enabled()

    def open_mask(mask: Any) -> Any:
        torch.backends.cuda.enable_cudnn_sdp(enabled)  # masks are built before the first layer of text
        _MASKS_ARE_SEEN.add(model)
        stats.leaves_cudnn_off = False
        return opened(mask)

    stats.leaves_cudnn_off = not (opens_masks and model in _MASKS_ARE_SEEN)
    with (
        cudnn_attention_off() if stats.leaves_cudnn_off else nullcontext(),
        watched_call(WatchedCall(open_mask=open_mask)) if opens_masks else nullcontext(),
    ):
        yield


def opened(mask: Any) -> Any:
    """A mask in which queries without any key attend to all keys."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    return mask | ~mask.any(-1, keepdim=True)
