"""In bfloat16 a bound may decide by rounding: which batches are set aside, and what is a fault all the same."""

import math
import sys
from unittest import mock

import pytest
import torch

from trl_fused_grpo.parity.compare import compare
from trl_fused_grpo.parity.flips import flip_verdict
from trl_fused_grpo.parity.random_cases import name_of, random_case
from trl_fused_grpo.parity.run_case import Outcome
from trl_fused_grpo.parity.trainers import Settings


BATCHES = 32


def outcomes(seed, error, flips=(), loss=1.0):
    """Gradients around one, each wrong by about `error`, and by a third in the batches that `flips` names."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(batch):
        noise = torch.randn(64, generator=generator)
        return torch.ones(64) + error * noise - (1 / 3 if batch in flips else 0.0)

    return [Outcome(loss, {"a": gradient(batch), "b": gradient(batch)}) for batch in range(BATCHES)]


@pytest.mark.parametrize(
    ("stock_flips", "fused_flips", "verdict"),
    [
        ((), (3,), "tie"),
        ((1, 2), (2, 3, 4), "tie"),
        ((), (3, 4, 5, 6, 7), None),  # stock has none: not by chance
        ((), (), None),  # no batch is far from the others, and yet a limit is exceeded
    ],
)
def test_a_few_batches_beyond_a_bound_are_a_tie(stock_flips, fused_flips, verdict):
    reference = outcomes(0, 0.0)
    stock = outcomes(1, 0.01, stock_flips)
    fused = outcomes(2, 0.01 if fused_flips else 0.015, fused_flips)
    assert flip_verdict(reference, stock, fused) == verdict


def test_batches_without_a_flip_must_be_within_the_limits():
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), outcomes(2, 0.015, (3,))) is None


def test_a_gradient_that_is_no_number_is_no_tie():
    fused = outcomes(2, 0.01)
    fused[3].tensors["a"] = torch.full((64,), math.nan)
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), fused) is None


def test_a_wrong_loss_is_no_tie():
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), outcomes(2, 0.01, loss=1.1)) is None


@pytest.mark.any_trl
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapter": "prefix-tuning", "stepwise": "parameter-hook-clips"}, "stock itself fails"),
        ({"adapter": "prefix-tuning", "model": "zamba2"}, "stock itself fails"),
    ],
)
def test_a_drawn_case_that_stock_cannot_train_is_skipped_in_bfloat16_too(tmp_path, options, reason):
    result = compare(random_case(name_of(options)), Settings(tmp_path, dtype=torch.bfloat16))
    assert result.verdict == "skipped"
    assert result.reason.startswith(reason)


def test_a_drawn_case_whose_gradient_is_no_number_in_stock_is_skipped_in_bfloat16_too(tmp_path):
    module = sys.modules[compare.__module__]
    run_case, runs = module.run_case, []

    def run(*args):
        runs.append(run_case(*args))
        if len(runs) == 2:  # after the reference
            runs[-1].tensors["model.norm.weight"].fill_(math.nan)
        return runs[-1]

    with mock.patch.object(module, "run_case", run):
        result = compare(random_case('random:{"rows":2,"group":2}'), Settings(tmp_path, dtype=torch.bfloat16))
    assert (result.verdict, len(runs)) == ("skipped", 2)
    assert "not finite" in result.reason
