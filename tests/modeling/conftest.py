"""A compiler that makes no kernels, and what was logged of it."""

import pytest
import torch

from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling import compiled_functions, compiled_modules


@pytest.fixture
def traced(monkeypatch):
    """Everything of a compilation but the kernels."""
    monkeypatch.setattr(torch_compat, "inductor", torch._dynamo.lookup_backend("aot_eager"))


@pytest.fixture
def told(monkeypatch):
    """What was logged as a warning."""
    lines = []
    for module in (compiled_functions, compiled_modules):
        monkeypatch.setattr(module.logger, "warning_once", lines.append)
    return lines
