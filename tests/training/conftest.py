"""A training without the comparisons of its first step, for tests that count forwards."""

import pytest

from trl_fused_grpo.training.checks import Check
from trl_fused_grpo.training.old_logps import DeferredLogps


@pytest.fixture
def unchecked(monkeypatch):
    """Neither is a micro-batch compared with TRL's own path, nor are log-probs computed that will be computed again."""
    generation = DeferredLogps.generation
    monkeypatch.setattr(Check, "compare_logps", lambda *args: None)
    monkeypatch.setattr(
        DeferredLogps, "generation", lambda self, steps_left, is_first: generation(self, steps_left, False)
    )
