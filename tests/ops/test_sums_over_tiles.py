"""Many tiles and chunks: sums that lose nothing, rows that are copied where they must be, forecasts of entropies."""

from unittest import mock

import pytest
import torch

from tests.oracle import KnownGradients, dense_logps, relative_error
from trl_fused_grpo import FusedStats, LMHead, fused_linear_logps
from trl_fused_grpo.ops import recompute
from trl_fused_grpo.ops.lm_head import LowRank


N, H, V = 40, 6, 11


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
def test_sums_over_as_many_tiles_as_rows_lose_nothing_in_bfloat16(backward):
    """Four equal logits have gradients of 3/4 and -1/4. A sum in bfloat16 would stop at 256 and at -64."""
    rows = 512
    weight, bias, b = (torch.zeros(*shape).bfloat16().requires_grad_() for shape in ((4, 2), (4,), (4, 1)))
    hidden, targets = torch.ones(rows, 2).bfloat16(), torch.zeros(rows, dtype=torch.long)
    head = LMHead(weight, bias, low_rank=(LowRank(torch.ones(1, 2).bfloat16(), b),))
    options = {"forecast": KnownGradients(torch.ones(rows)), "backward": backward, "logits_mib": 1e-6}
    logps, _ = fused_linear_logps(hidden, head, targets, stats=(stats := FusedStats()), **options)
    expected = rows * torch.tensor([[0.75], [-0.25], [-0.25], [-0.25]])
    of_weight, of_bias, of_b = torch.autograd.grad(logps.sum(), (weight, bias, b))
    assert stats.backward == backward
    assert torch.equal(of_weight.float(), expected.expand(4, 2))
    assert torch.equal(of_bias.float(), expected[:, 0])
    assert torch.equal(of_b.float(), 2 * expected)  # its input is two


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
def test_the_sum_of_a_chunk_is_not_rounded_before_it_goes_to_a_bias_in_float32(backward):
    """171/2 and 513/2, which bfloat16 does not have."""
    rows, bias = 342, torch.zeros(4, requires_grad=True)
    options = {"forecast": KnownGradients(torch.ones(rows)), "backward": backward}
    with torch.autocast("cpu", torch.bfloat16):
        logps, _ = fused_linear_logps(
            torch.ones(rows, 2), LMHead(torch.zeros(4, 2), bias), torch.zeros(rows, dtype=torch.long), **options
        )
    assert torch.autograd.grad(logps.sum(), bias)[0].tolist() == [256.5, -85.5, -85.5, -85.5]


class ProductOfBoth:
    """The forecast of the loss that multiplies the log-probability of each row by its entropy."""

    grad_rows = N

    def __call__(self, rows, logps, entropies):
        return entropies.clone(), logps.clone()


def test_a_forecast_may_read_the_entropies():
    hidden, weight = randn(N, H, seed=0).requires_grad_(), randn(V, H, seed=1).requires_grad_()
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
    options = {"forecast": ProductOfBoth(), "entropy_grad": True, "logits_mib": 4e-4, "stats": (stats := FusedStats())}
    logps, entropies = fused_linear_logps(hidden, LMHead(weight), targets, **options)
    found = torch.autograd.grad((logps * entropies).sum(), (hidden, weight))
    leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logps, entropies = dense_logps(*leaves, targets)
    for mine, truth in zip(found, torch.autograd.grad((logps * entropies).sum(), leaves), strict=True):
        assert relative_error(mine, truth) < 2e-6
    assert (stats.backward, stats.recomputed) == ("forecast", 0)


@pytest.mark.parametrize("all_rows", [True, False])
def test_recomputation_copies_hidden_states_where_rows_are_left_out_alone(all_rows):
    hidden, weight = randn(N, H, seed=0).requires_grad_(), randn(V, H, seed=1).requires_grad_()
    logps, _ = fused_linear_logps(hidden, LMHead(weight), torch.zeros(N, dtype=torch.long), backward="recompute")
    grads = torch.ones(N)
    grads[3] = float(all_rows)
    with mock.patch.object(recompute, "_TiledBackward", side_effect=recompute._TiledBackward) as computed:
        torch.autograd.grad(logps, hidden, grads)
    [call] = computed.call_args_list
    assert len(call.args[1]) == grads.count_nonzero()
    assert (call.args[1].data_ptr() == hidden.data_ptr()) == all_rows
