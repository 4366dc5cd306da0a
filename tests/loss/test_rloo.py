"""The forecast of RLOO's gradients against autograd of its loss, written down anew in float64."""

import pytest
import torch

from tests.oracle import relative_error
from trl_fused_grpo.loss.batch import GRPOBatch, as_columns
from trl_fused_grpo.loss.forecast import forecast, grad_rows_first
from trl_fused_grpo.loss.objective import rloo_objective

from .test_objective import LOGPS, MASK, OLD


EPSILON_LOW, EPSILON_HIGH = 0.2, 0.3
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, 0.0, -2.1])


def gradient_of_the_loss(logps, old_sums, advantages):
    """Of the mean over sequences of the clipped product of their tokens' ratios."""
    leaf = logps.double().requires_grad_()
    ratio = ((leaf * MASK).sum(1) - old_sums).exp()
    clipped = ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    return torch.autograd.grad(loss, leaf)[0]


def rloo_forecast(old_sums, epsilon_low=EPSILON_LOW, epsilon_high=EPSILON_HIGH):
    old = None if old_sums is None else as_columns(old_sums)
    return forecast(rloo_objective(epsilon_low, epsilon_high), GRPOBatch(MASK, as_columns(ADVANTAGES), old))


def forecast_of_rows(forecast, logps):
    """The forecast of all rows that need a gradient, and their flat positions; the others need none."""
    positions, grad_rows = grad_rows_first(MASK.bool(), forecast.needs_grad)
    rows = forecast.at(positions, grad_rows)
    grads, entropies = rows(slice(0, grad_rows), logps.flatten()[positions[:grad_rows]], None)
    assert entropies is None
    return grads, positions[:grad_rows], positions[grad_rows:]


@pytest.mark.parametrize("difference", [0.0, 0.15, -0.15, 0.5, -0.5])
def test_off_policy_the_gradient_is_the_ratio_s_or_nothing_where_it_is_clipped(difference):
    # In turns to both sides, so that each sign of an advantage meets each bound
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    old_sums = (LOGPS * MASK).sum(1) - difference * signs
    forecast = rloo_forecast(old_sums)
    found, positions, others = forecast_of_rows(forecast, LOGPS)
    truth = gradient_of_the_loss(LOGPS, old_sums.double(), ADVANTAGES.double()).flatten()
    assert not truth[others].any()
    assert relative_error(found / forecast.unit, truth[positions]) < 1e-5
    assert torch.equal(forecast.needs_grad.any(1), ADVANTAGES != 0)
    in_double, *_ = forecast_of_rows(forecast, LOGPS.double())
    assert in_double.dtype == torch.float64
    assert relative_error(in_double / forecast.unit, truth[positions]) < 1e-5


def test_all_tokens_of_a_sequence_receive_the_same():
    old_sums = (OLD * MASK).sum(1)
    forecast = rloo_forecast(old_sums, 9.0, 9.0)
    positions, grad_rows = grad_rows_first(MASK.bool(), forecast.needs_grad)
    rows = forecast.at(positions, grad_rows)
    assert rows.groups.have_equal_grads is True
    assert rows.groups.ends == MASK.sum(1)[ADVANTAGES != 0].cumsum(0).tolist()
    begin = 0
    for end in rows.groups.ends:  # a chunk at a time
        grads, _ = rows(slice(begin, end), LOGPS.flatten()[positions[begin:end]], None)
        assert grads.unique().numel() == 1
        begin = end


def test_on_policy_each_token_receives_its_advantage():
    forecast = rloo_forecast(None)
    assert forecast.by_token
    found, positions, _ = forecast_of_rows(forecast, LOGPS)
    expected = (-ADVANTAGES[:, None] * MASK / len(MASK)).flatten()[positions]
    assert relative_error(found / forecast.unit, expected.double()) < 1e-6


def test_the_objective_sums_over_tokens_and_has_the_bounds():
    objective = rloo_objective(0.1, 0.4)
    assert (objective.epsilon_low, objective.epsilon_high) == (0.1, 0.4)
    assert objective.effective_reduction == "sequence_sum"
