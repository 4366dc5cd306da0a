"""A training without the comparison of its first step, for tests that count forwards."""

import pytest

from trl_fused_grpo.training.checks import Check


@pytest.fixture
def unchecked(monkeypatch):
    """No micro-batch is compared with TRL's own path, in a forward of its own."""
    monkeypatch.setattr(Check, "compare_logps", lambda *args: None)
