"""
What the processes of a training tell one another of their batches. FSDP and ZeRO-3 gather weights whenever the model is
called, so that all must choose the same layout and call it as often.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo.modeling.layout_choice import depends_on_width


def of_all_processes(accelerator: Any, values: list[int] | list[bool]) -> Tensor:
    """Numbers of each process `[processes, n]`."""
    if accelerator.num_processes == 1:
        return torch.tensor([values])
    return accelerator.gather(torch.tensor([values], dtype=torch.long, device=accelerator.device)).cpu()


def with_images_anywhere(accelerator: Any, causal_lm: PreTrainedModel, with_images: list[bool]) -> list[bool]:
    """For each of some batches, whether it has images on any process."""
    if not architecture.may_take_images(causal_lm):
        return with_images
    return of_all_processes(accelerator, with_images).any(0).tolist()


def widest_batch(accelerator: Any, causal_lm: PreTrainedModel, shape: tuple[int, int]) -> tuple[int, int]:
    """
    The `shape` of a batch in TRL's padding, sequences and columns. Where the layout depends on it, each is the most of
    any process.
    """
    size, width = shape
    if depends_on_width(causal_lm):
        size, width = of_all_processes(accelerator, [size, width]).amax(0).tolist()
    return size, width
