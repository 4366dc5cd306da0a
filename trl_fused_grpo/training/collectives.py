"""
What the processes of a training tell one another of their batches. FSDP and ZeRO-3 gather weights whenever the model is
called, so that all must choose the same layout and call it as often.
"""

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo.modeling.rows.layout_choice import depends_on_width


def of_all_processes(accelerator: Any, what: str, values: list[int] | list[bool]) -> Tensor:
    """Numbers of each process `[processes, n]`."""
    if accelerator.num_processes == 1:
        return torch.tensor([values])
    mine = torch.tensor([[crc32(what.encode()), *values]], dtype=torch.long, device=accelerator.device)
    everyone = accelerator.gather(mine).cpu()
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise RuntimeError(
            f"Processes of this training are at different places: this one tells the others of its {what}, and they "
            "tell something else. What you hook, replace or change in the middle of an accumulation window must be the "
            "same on all processes."
        )
    return everyone[:, 1:]


def on_any_process(accelerator: Any, what: str, condition: bool) -> bool:
    """Return `True` if a condition holds on any process. All of them ask for the same, see [`of_all_processes`]."""
    return bool(of_all_processes(accelerator, what, [condition]).any())


def images_on_any_process(accelerator: Any, causal_lm: PreTrainedModel, has_images: bool) -> bool:
    """Return `True` if any process has images."""
    if not architecture.may_take_images(causal_lm):
        return has_images
    return on_any_process(accelerator, "images", has_images)


def widest_batch(accelerator: Any, causal_lm: PreTrainedModel, shape: tuple[int, int]) -> tuple[int, int]:
    """
    The `shape` of a batch in TRL's padding, sequences and columns. Where it decides whether rows may be packed, each is
    the most of any process.
    """
    size, width = shape
    if depends_on_width(causal_lm):
        size, width = of_all_processes(accelerator, "shape of rows", [size, width]).amax(0).tolist()
    return size, width
