"""
What the processes of a training tell one another of their batches. FSDP and ZeRO-3 gather weights whenever the model is
called, so that all must choose the same layout and call it as often.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.layout_choice import depends_on_width
from trl_fused_grpo.modeling.out_of_memory import MemoryWatch, layers_with_shards


def of_all_processes(accelerator: Any, values: list[int] | list[bool]) -> Tensor:
    """Numbers of each process `[processes, n]`."""
    if accelerator.num_processes == 1:
        return torch.tensor([values])
    return accelerator.gather(torch.tensor([values], dtype=torch.long, device=accelerator.device)).cpu()


def why_not_split(trainer: Any, causal_lm: PreTrainedModel) -> str | None:
    """
    Why a forward is not split where memory runs out in it, or `None`. A process whose forward ends early must not leave
    others waiting.
    """
    state = trainer.accelerator.state
    if getattr(state.deepspeed_plugin, "zero_stage", 0) == 3:
        return "ZeRO-3 gathers weights at each projection"
    if trl_compat.shares_sequences(trainer):
        return "a forward is split over processes"
    if state.distributed_type == DistributedType.FSDP and layers_with_shards(causal_lm) is None:
        return "FSDP gathers weights within layers or for images"
    return None


def memory_watch(trainer: Any, causal_lm: PreTrainedModel) -> Callable[[], MemoryWatch]:
    """What makes a watch for each forward that may be split where memory runs out on any process."""
    accelerator = trainer.accelerator
    is_sharded = accelerator.state.distributed_type == DistributedType.FSDP
    layers = (layers_with_shards(causal_lm) if is_sharded else None) or []

    def on_any_process(condition: bool) -> bool:
        return bool(of_all_processes(accelerator, [condition]).any())

    return lambda: MemoryWatch(on_any_process, layers)


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
