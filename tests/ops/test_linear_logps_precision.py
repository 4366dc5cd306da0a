"""The fused linear function in low precision and under autocast, its modes, and what it refuses."""

import pytest
import torch

from tests.oracle import KnownGradients, dense_logps, relative_error
from trl_fused_grpo import FusedStats, LMHead, fused_linear_logps
from trl_fused_grpo.ops.chunk_size import rows_per_chunk
from trl_fused_grpo.ops.linear_logps import choose_backward

from .test_linear_logps import GRAD_ROWS, N, Problem, assert_close


@pytest.mark.parametrize("backward", ["frozen", "forecast", "recompute"])
def test_bfloat16_errors_are_at_most_those_of_a_dense_bfloat16_computation(backward):
    problem = Problem(torch.bfloat16, frozen=backward == "frozen", bias=False)
    forecast = KnownGradients(problem.grad_logps) if backward == "forecast" else None
    values, _ = problem.fused(forecast, backward=backward)
    truth = problem.truth()
    logps, entropies = dense_logps(problem.hidden, problem.weight, problem.targets, **problem.options)
    dense = (logps, entropies, *torch.autograd.grad(problem.objective(logps, entropies), problem.leaves()))
    for value, other, exact in zip(values, dense, truth, strict=True):
        assert relative_error(value, exact) <= relative_error(other, exact)


@pytest.mark.parametrize("forecast", [True, False], ids=["forecast", "recompute"])
def test_float16_keeps_gradients_that_would_underflow_unscaled(forecast):
    problem = Problem(torch.float16, bias=False)
    factor = 1e-6  # an unscaled gradient: p * g of most logits is below float16's smallest number
    values, stats = problem.fused(KnownGradients(problem.grad_logps) if forecast else None, factor * 2**20)
    assert stats.recomputed == (0 if forecast else GRAD_ROWS)
    assert_close(values, problem.truth(factor * 2**20), 5e-3)


def test_autocast_casts_master_weights_and_keeps_their_gradient_in_float32():
    problem = Problem(bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = fused_linear_logps(problem.hidden, problem.head(), problem.targets)
    grads = torch.autograd.grad((logps * problem.grad_logps).sum(), problem.leaves())
    assert logps.dtype == torch.float32 and [g.dtype for g in grads] == [torch.float32] * 2
    truth, _ = dense_logps(problem.hidden.double(), problem.weight.double(), problem.targets, logit_scale=1.3)
    assert 1e-5 < relative_error(logps, truth) < 1e-2  # bfloat16 logits, no less and no more


def test_an_fp32_head_ignores_autocast():
    problem = Problem(bias=False)
    head = LMHead(problem.weight, logit_scale=1.3, fp32=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = fused_linear_logps(problem.hidden, head, problem.targets, 0.7)
    assert relative_error(logps, problem.truth()[0]) < 1e-6


def test_an_impossible_backward_mode_raises_with_the_reason():
    problem = Problem()
    with pytest.raises(ValueError, match="without trainable parameters"):
        problem.fused(backward="frozen")
    with pytest.raises(ValueError, match="needs a forecast"):
        problem.fused(backward="forecast")


def test_shapes_that_do_not_fit_raise_with_the_shapes():
    with pytest.raises(ValueError, match=r"\[3, 4\].*\[2\].*\[7, 4\]"):
        fused_linear_logps(torch.zeros(3, 4), LMHead(torch.zeros(7, 4)), torch.zeros(2, dtype=torch.long))


def test_the_backward_mode_is_the_cheapest_possible_one():
    assert choose_backward(head_needs_grad=False, forecast=None, entropy_grad=False) == "frozen"
    assert choose_backward(head_needs_grad=False, forecast=None, entropy_grad=True) == "recompute"
    assert (
        choose_backward(head_needs_grad=True, forecast=KnownGradients(torch.ones(1)), entropy_grad=True) == "forecast"
    )
    assert choose_backward(head_needs_grad=True, forecast=None, entropy_grad=False) == "recompute"


@pytest.mark.parametrize(
    ("logits_mib", "rows"),
    [(3000, 8192), (1700, 4096), (617, 2048), (569, 1024), (297, 1024), (256, 768), (60, 128), (10, 34), (0.001, 1)],
)
def test_a_chunk_of_logits_fits_into_its_memory_with_a_number_of_rows_that_is_fast(logits_mib, rows):
    assert rows_per_chunk(vocab_size=151936, itemsize=2, logits_mib=logits_mib) == rows


def test_results_repeat_to_the_bit():
    problem = Problem()
    first, second = (problem.fused(KnownGradients(problem.grad_logps))[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_gradient_no_mode_is_taken_and_by_default_entropies_need_none():
    problem, stats = Problem(frozen=True), FusedStats()
    rows = problem.hidden, problem.head(), problem.targets
    fused_linear_logps(*rows, stats=stats)
    assert (stats.backward, stats.rows, stats.recomputed) == ("frozen", N, 0)
    with torch.no_grad():
        _, entropies = fused_linear_logps(*rows, entropy=False, stats=stats)
    assert (stats.backward, entropies) == ("no_grad", None)
    fused_linear_logps(problem.hidden.detach(), *rows[1:], stats=stats)
    assert stats.backward == "no_grad"


def test_under_autocast_the_bits_of_log_probs_are_those_of_a_head_in_bfloat16():
    problem, low = Problem(), Problem(torch.bfloat16)
    with torch.no_grad():
        problem.hidden.copy_(low.hidden)
        low.weight.copy_(problem.weight)
        low.bias.copy_(problem.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, _ = problem.fused()
    other, _ = low.fused()
    assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
