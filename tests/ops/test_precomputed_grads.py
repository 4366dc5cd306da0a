"""What the forward assumed against what backward receives: how exact a forecast must be, and graphs that are kept."""

import pytest
import torch

from tests.oracle import KnownGradients
from trl_fused_grpo import fused_linear_logps
from trl_fused_grpo.ops.precomputed_grads import FORECAST_ATOL, FORECAST_RTOL, _rows_that_differ

from .test_linear_logps import Problem, assert_close


ROWS = slice(30, 45)  # whose forecast is wrong


def problem_with_a_forecast_wrong_by(error, entropy=False):
    """The forecast of some rows is wrong by this part of their gradient."""
    problem = Problem(entropy=entropy)
    problem.grad_logps[ROWS] = torch.linspace(0.5, 2.0, 15)
    wrong = problem.grad_logps.clone()
    wrong[ROWS] *= 1 + error
    return problem, KnownGradients(wrong, problem.grad_entropies)


@pytest.mark.parametrize("entropy", [False, True], ids=["logps", "logps-and-entropy"])
@pytest.mark.parametrize("error", [4e-2, 1e-3, 2e-5])
def test_a_small_error_of_the_forecast_is_recomputed(error, entropy):
    problem, forecast = problem_with_a_forecast_wrong_by(error, entropy)
    values, stats = problem.fused(forecast)
    assert_close(values, problem.truth(), 2e-6)
    assert stats.recomputed == 15


def test_a_rounding_error_of_the_forecast_is_none():
    problem, forecast = problem_with_a_forecast_wrong_by(1e-6)
    values, stats = problem.fused(forecast)
    assert_close(values, problem.truth(), 2e-6)
    assert stats.recomputed == 0


def test_the_tolerance_stays_below_that_of_parity():
    assert FORECAST_RTOL + FORECAST_ATOL < 5e-6


def test_an_error_of_the_entropies_forecast_is_recomputed():
    problem = Problem(entropy=True)
    problem.grad_entropies[ROWS] = 1.0
    wrong = problem.grad_entropies.clone()
    wrong[ROWS] = 1.0001
    values, stats = problem.fused(KnownGradients(problem.grad_logps, wrong))
    assert_close(values, problem.truth(), 2e-6)
    assert stats.recomputed == 15


def test_a_small_gradient_differs_by_its_own_size():
    """A row a thousand times smaller than the others may not be wrong by one percent."""
    true = torch.ones(1, 100)
    true[0, 7] = 1e-3
    assumed = true.clone()
    assumed[0, 7] *= 1.01
    assert _rows_that_differ(true, assumed).nonzero().tolist() == [[7]]


def test_what_remains_where_terms_cancel_is_rounding():
    """Policy and KL term of a row cancel; the others have gradients of size one."""
    true = torch.ones(1, 100)
    true[0, 7] = 0.0
    assumed = true.clone()
    assumed[0, 7] = 1e-7
    assert not _rows_that_differ(true, assumed).any()


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong-in-some-rows"])
@pytest.mark.parametrize("backward", ["frozen", "forecast", "recompute"])
def test_each_backward_through_a_retained_graph_gives_its_own_gradient(backward, wrong):
    """What the forward built must count once; the tensors that the first backward returned stay as they are."""
    problem = Problem(frozen=backward == "frozen")
    assumed = problem.grad_logps.clone()
    if wrong:
        assumed[ROWS] *= -3
    logps, _ = fused_linear_logps(
        problem.hidden,
        problem.head(),
        problem.targets,
        problem.options["temperature"],
        KnownGradients(assumed) if backward == "forecast" else None,
    )
    loss = (logps * problem.grad_logps).sum()
    factors = (1.0, 3.0, -0.5)
    found = [torch.autograd.grad(loss * factor, problem.leaves(), retain_graph=True) for factor in factors]
    for factor, gradients in zip(factors, found, strict=True):
        assert_close(gradients, problem.truth(factor)[2:], 3e-6)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained-head", "frozen-head"])
def test_a_gradient_of_entropies_that_nobody_announced_is_not_lost(frozen):
    problem = Problem(frozen=frozen, entropy=True)
    values, stats = problem.fused(None if frozen else KnownGradients(problem.grad_logps), entropy_grad=False)
    assert_close(values, problem.truth(), 3e-6)
    assert stats.backward == ("frozen" if frozen else "forecast")
    assert stats.recomputed > 0


@pytest.mark.parametrize("zeros", ["true", "assumed"])
def test_rows_with_a_zero_do_not_decide_about_the_common_factor(zeros):
    problem = Problem()
    problem.grad_logps[:] = torch.linspace(0.5, 2.0, len(problem.grad_logps))
    assumed = 7 * problem.grad_logps
    (problem.grad_logps if zeros == "true" else assumed)[100:] = 0
    values, stats = problem.fused(KnownGradients(assumed), backward="forecast")
    assert_close(values, problem.truth(), 3e-6)
    # Where the greater part of what is assumed is wrong, all rows with a gradient are computed again
    assert stats.recomputed == (100 if zeros == "true" else len(assumed) - 100)


def test_an_infinite_gradient_excuses_no_other_row():
    true = torch.full((1, 100), 1e-8)
    true[0, 3] = float("inf")
    assumed = true.clone()
    assumed[0, 7] *= 1.01
    assert _rows_that_differ(true, assumed).nonzero().tolist() == [[3], [7]]


def test_gradients_of_entropies_differ_by_their_own_size():
    true = torch.stack([torch.ones(100), torch.full((100,), 1e-7)])
    assumed = true.clone()
    assumed[1, 7] *= 1.01
    assert _rows_that_differ(true, assumed).nonzero().tolist() == [[7]]
    assert not _rows_that_differ(torch.zeros(2, 9), torch.zeros(2, 9)).any()


def test_an_assumed_gradient_of_entropies_that_does_not_come_is_taken_back():
    problem = Problem()
    values, stats = problem.fused(KnownGradients(problem.grad_logps, 0.1 * torch.ones_like(problem.grad_logps)))
    assert_close(values, problem.truth(), 3e-6)
    assert stats.recomputed > 0
