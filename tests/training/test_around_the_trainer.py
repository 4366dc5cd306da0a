"""
What people do around the trainer trains as in stock: reward functions that call the log-prob method, classes between
`FusedGRPOTrainer` and `GRPOTrainer`, training loops and hooks of their own.
"""

from types import SimpleNamespace

import pytest

from tests.harness.cases.around_the_trainer import around
from tests.harness.run_training import run_both
from tests.harness.training_errors import problems_of
from trl_fused_grpo.parity.case import SkippedError
from trl_fused_grpo.parity.trainers import Settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parity
@pytest.mark.parametrize("case", around(), ids=lambda case: case.name)
def test_a_training_ends_as_in_stock(case, settings):
    try:
        pair = run_both(case, settings)
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert problems_of(case, pair, SimpleNamespace()) == []
