"""In bfloat16 a few batches may have nearly all of the error: what is chance then, and what is a fault."""

import pytest
import torch

from tests.harness.chance import chance_verdict
from trl_fused_grpo.parity.judge import Result, measure, problems_beside_float64
from trl_fused_grpo.parity.run_case import Outcome


BATCHES = 256


def outcomes(seed, factor=1.0, largest=(), faults=(), loss=0.0):
    """
    Gradients of zero, each wrong by about a hundredth times `factor`, by a hundred times that in batches of `largest`,
    and by a thousand times that in those of `faults`.
    """
    generator = torch.Generator().manual_seed(seed)
    results = []
    for batch in range(BATCHES):
        size = 0.01 * factor * (100 if batch in largest else 1000 if batch in faults else 1)
        noise = size * torch.randn(2, 8, generator=generator)
        results.append(Outcome(1.0 + loss * float(noise.sum()), {"a": noise[0], "b": noise[1]}))
    return results


def exact():
    return [Outcome(1.0, {"a": torch.zeros(8), "b": torch.zeros(8)}) for _ in range(BATCHES)]


def verdict_of(stock, fused):
    """The verdict, of outcomes that exceed a limit."""
    reference = [Outcome(1.0, {name: torch.ones(8) for name in ("a", "b")}) for _ in range(BATCHES)]
    for outcome in (*stock, *fused):
        outcome.tensors = {name: tensor + 1.0 for name, tensor in outcome.tensors.items()}
    assert problems_beside_float64(measure(reference, fused), measure(reference, stock), Result("", ""))
    return chance_verdict(reference, stock, fused)


def test_more_error_in_the_few_batches_that_have_nearly_all_of_it_is_chance():
    stock, fused = (outcomes(seed, largest=(3, 70, 200)) for seed in (1, 2))
    fused[3].tensors = {name: 1.6 * tensor for name, tensor in fused[3].tensors.items()}
    assert verdict_of(stock, fused) == "rounding"


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_more_error_in_every_batch_is_a_difference(factor):
    assert verdict_of(outcomes(1), outcomes(2, factor)) is None
    stock, fused = outcomes(1, largest=(3, 70, 200)), outcomes(2, factor, largest=(3, 70, 200))
    assert verdict_of(stock, fused) is None


@pytest.mark.parametrize("faults", [(5,), (5, 6, 7), tuple(range(0, 256, 9))])
def test_a_fault_of_few_batches_is_a_difference(faults):
    """In one batch of 256 it could have been either trainer; its size tells."""
    assert verdict_of(outcomes(1), outcomes(2, faults=faults)) is None


def test_more_error_in_many_of_the_large_batches_is_a_difference():
    """Nothing is seen of it in the mean over batches, nor in the size of one."""
    largest = tuple(range(0, 256, 16))
    fused = outcomes(2, largest=largest)
    for batch in largest:
        fused[batch].tensors = {name: 2 * tensor for name, tensor in fused[batch].tensors.items()}
    assert verdict_of(outcomes(1, largest=largest), fused) is None


def test_an_error_where_stock_has_none_is_a_difference():
    fused = outcomes(2)
    fused[0].tensors = {name: tensor * 0 for name, tensor in fused[0].tensors.items()}
    assert verdict_of(exact(), fused) is None


def test_a_loss_that_is_off_is_a_difference():
    assert verdict_of(outcomes(1, loss=1.0), outcomes(2, loss=4.0)) is None
