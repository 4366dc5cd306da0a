"""What runs compiled in a training."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import torch

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.compiled_functions import CompiledFunction


@contextmanager
def compiled_calls() -> Generator[Counter[str], None, None]:
    """
    While it lasts, everything of a compilation happens but the making of kernels, and calls of what is compiled are
    counted by name; those that ran as they are, as `"eager"`.
    """
    counts: Counter[str] = Counter()
    run = CompiledFunction.__call__

    def counted(self, tensors, original):
        counts[self.name] += 1
        return run(self, tensors, lambda: counts.update(["eager"]) or original())

    tracing = torch._dynamo.lookup_backend("aot_eager")
    with (
        mock.patch.object(torch_compat, "inductor", tracing),
        mock.patch.object(CompiledFunction, "__call__", counted),
    ):
        yield counts
