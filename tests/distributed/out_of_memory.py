"""Memory that runs out in a forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from trl_fused_grpo.modeling import fused_forward
from trl_fused_grpo.modeling.fused_forward import FusedRequest
from trl_fused_grpo.modeling.out_of_memory import MemoryWatch

from .runs import ROWS


@contextmanager
def memory_runs_out(in_head: bool = False) -> Iterator[None]:
    """
    While it lasts, this process has memory for the forward of one micro-batch alone.

    Args:
        in_head (`bool`): whether it runs out in the head, or in the second layer.
    """
    answer, run_layer = FusedRequest.__call__, MemoryWatch._run_layer
    run_backbone, run_head = fused_forward.run_backbone, fused_forward.fused_linear_logps
    is_shared = False

    def run_out(condition: bool) -> None:
        if is_shared and condition:
            raise torch.OutOfMemoryError("as CUDA would")

    def answered(self, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_shared
        is_shared = torch.is_grad_enabled() and len(self.completion_ids) > ROWS
        return answer(self, *args, **kwargs)

    def layer(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        def limited(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            run_out(not in_head and self._called == 2)
            return output

        return run_layer(self, module, limited, *args, **kwargs)

    def backbone(*args: Any) -> Any:
        outputs = run_backbone(*args)
        run_out(not in_head)  # unless it did in a layer: there are none where processes do not wait at them
        return outputs

    def head(*args: Any, **kwargs: Any) -> Any:
        results = run_head(*args, **kwargs)
        run_out(in_head)
        return results

    with (
        mock.patch.object(FusedRequest, "__call__", answered),
        mock.patch.object(MemoryWatch, "_run_layer", layer),
        mock.patch.object(fused_forward, "run_backbone", backbone),
        mock.patch.object(fused_forward, "fused_linear_logps", head),
    ):
        yield
