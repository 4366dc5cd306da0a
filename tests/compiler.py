"""Trainings whose decoder layers are compiled: everything of a compilation but the making of kernels."""

import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import torch

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.layers import compiled as compiled_layers
from trl_fused_grpo.modeling.layers.compiled import _CompiledLayer


@contextmanager
def traced_layers(backend: str = "aot_eager") -> Generator[Counter[str], None, None]:
    """
    While it lasts, graphs of layers run as torch's operations, nothing that was compiled before is known, and calls of
    layers are counted by class; graphs as `"graphs"`, and layers that ran as they are as `"eager"`.
    """
    counts: Counter[str] = Counter()
    run, as_it_is = _CompiledLayer.__call__, compiled_layers._without_checkpointing
    compile_graph = torch_compat.inductor if backend == "inductor" else torch._dynamo.lookup_backend(backend)

    def counted(self, *args, **kwargs):
        counts[type(self.layer).__name__] += 1
        return run(self, *args, **kwargs)

    def counted_graphs(graph, example_inputs):
        counts["graphs"] += 1
        return compile_graph(graph, example_inputs)

    def counted_eager(*args, **kwargs):
        counts["eager"] += 1
        return as_it_is(*args, **kwargs)

    torch._dynamo.reset()
    with (
        mock.patch.object(logging.getLogger("torch.__trace"), "disabled", True),  # pytest would keep it
        mock.patch.object(torch_compat, "inductor", counted_graphs),
        mock.patch.object(_CompiledLayer, "__call__", counted),
        mock.patch.object(compiled_layers, "_without_checkpointing", counted_eager),
        mock.patch.dict(compiled_layers._compiled, clear=True),
        mock.patch.dict(compiled_layers._refused, clear=True),
        mock.patch.object(compiled_layers, "_drawing", set()),
    ):
        yield counts
