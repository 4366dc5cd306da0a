"""What a user changes in the middle of a training is heeded from the next step on. `tests.harness` has more."""

import pytest

from tests.harness import CUSTOMISED_CASES, compare
from trl_fused_grpo.parity import Settings


pytestmark = pytest.mark.ends

CASES = {case.name: case for case in CUSTOMISED_CASES}


@pytest.mark.parametrize(
    "name",
    [
        *("step-iterations", "rloo-iterations"),
        *("part-eager-later", "part-softmax-later", "part-repeat-kv-later", "part-sdpa-later", "part-linear-later"),
        *("part-rotary-column-later", "part-norm-mixes-later", "part-dropout-vllm-later"),
    ],
)
def test_a_training_is_stock_s(name, tmp_path):
    result = compare(CASES[name], Settings(tmp_path))
    assert (result.verdict, result.reason) == ("equal", "")
