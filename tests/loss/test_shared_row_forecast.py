"""The forecast of rows that several terms read, as tokens of a trie: that of the sum of their losses, in any chunks."""

import pytest
import torch

from trl_fused_grpo.loss.forecast import SharedRowForecast
from trl_fused_grpo.loss.objective import GRPOObjective


POSITIONS = torch.tensor([6, 2, 9, 4, 0, 7])  # rows are computed for these, the first four with a gradient
TERMS = torch.tensor([4, 2, 6, 2, 4, 4, 6])  # the position of each; none reads 9
ADVANTAGES = torch.tensor([1.5, -0.7, 0.4, 2.0, -1.1, 0.3, -2.0], dtype=torch.float64)
# Ratios from 0.4 to 2.7: those of some terms are clipped from above, of others from below, of others not
LOG_RATIOS = torch.tensor([0.1, -0.9, 1.0, 0.2, -0.8, 0.05, -0.1], dtype=torch.float64)
LOGPS = torch.linspace(-3.0, -0.2, 10, dtype=torch.float64)  # of each position
OBJECTIVE = GRPOObjective(epsilon_low=0.2, epsilon_high=0.3)


def gradient_by_autograd():
    """Of the clipped policy loss, summed over terms, by position."""
    logps = LOGPS.clone().requires_grad_()
    ratio = (logps[TERMS] - (LOGPS[TERMS] - LOG_RATIOS)).exp()
    clipped = ratio.clamp(1 - OBJECTIVE.epsilon_low, 1 + OBJECTIVE.epsilon_high)
    loss = -torch.minimum(ratio * ADVANTAGES, clipped * ADVANTAGES).sum()
    return torch.autograd.grad(loss, logps)[0]


@pytest.mark.parametrize("ends", [(4,), (1, 4), (1, 2, 3, 4), (2, 3, 4)])
def test_rows_have_the_gradient_of_all_terms_that_read_them(ends):
    forecast = SharedRowForecast.of(OBJECTIVE, POSITIONS, 4, (TERMS, ADVANTAGES, LOGPS[TERMS] - LOG_RATIOS))
    assert forecast.grad_rows == 4
    found, start = [], 0
    for end in ends:
        grad, of_entropies = forecast(slice(start, end), LOGPS[POSITIONS[start:end]], None)
        assert of_entropies is None
        found.append(grad)
        start = end
    expected = gradient_by_autograd()[POSITIONS[:4]]
    assert (expected != 0).sum() == 3
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=0)
