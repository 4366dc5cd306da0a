"""Metrics of one micro-batch by hand: which tokens are clipped, and means over the tokens that count."""

import pytest
import torch

from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.metrics import named_metrics
from trl_fused_grpo.loss.objective import GRPOObjective, TokenTerms


LOW, HIGH = 0.25, 0.5
# Per loss: ratios below, on and above its bounds
BOUNDS = {
    "grpo": (1 - LOW, 1 + HIGH),
    "cispo": (0.1, HIGH),  # it has no lower one
    "sapo": (0.1, 100.0),  # and this clips nothing
}


def terms_of(ratio, **others):
    given = dict.fromkeys(TokenTerms._fields)
    return TokenTerms(**{**given, "loss": torch.zeros_like(ratio), "ratio": ratio, **others})


@pytest.mark.parametrize("advantage", [-2.0, -0.5, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("loss_type", BOUNDS)
def test_tokens_beyond_a_bound_count_where_their_advantage_would_push_them_on(loss_type, advantage):
    low, high = BOUNDS[loss_type]
    ratio = torch.tensor(
        [[low - 0.01, low, low + 0.01, 0.9 * high, high, high + 0.01, high + 9.0]], dtype=torch.float64
    )
    mask = torch.ones(1, 7)
    mask[0, 6] = 0  # does not count
    objective = GRPOObjective(loss_type=loss_type, epsilon_low=LOW, epsilon_high=HIGH)
    metrics = named_metrics(objective, GRPOBatch(mask, torch.tensor([[advantage]])), terms_of(ratio), None)
    is_low, is_high = advantage < 0 and loss_type == "grpo", advantage > 0 and loss_type != "sapo"
    if loss_type == "cispo":  # TRL's name
        assert metrics.keys() == {"cispo_clip_ratio"}
        assert metrics["cispo_clip_ratio"].item() == pytest.approx(is_high / 6)
        return
    assert metrics["clip_ratio/low_mean"].item() == pytest.approx(is_low / 6)
    assert metrics["clip_ratio/high_mean"].item() == pytest.approx(is_high / 6)
    assert metrics["clip_ratio/region_mean"].item() == pytest.approx((is_low or is_high) / 6)
    assert metrics.keys() == {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


def test_a_ratio_of_zero_is_clipped_by_no_loss_that_clips_nothing():
    batch = GRPOBatch(torch.ones(1, 2), torch.tensor([[-1.0]]))
    metrics = named_metrics(GRPOObjective(loss_type="sapo"), batch, terms_of(torch.zeros(1, 2)), None)
    assert metrics["clip_ratio/region_mean"].item() == 0.0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_means_are_over_the_tokens_that_count(count):
    mask = (torch.arange(4) < count).float()[None]
    values = torch.tensor([[1.0, 2.0, 6.0, 100.0]])
    terms = terms_of(torch.ones(1, 4), kl=values, phi=torch.tensor([[3.0]]))
    batch = GRPOBatch(mask, torch.tensor([[1.0]]))
    metrics = named_metrics(GRPOObjective(loss_type="vespo", beta=0.1), batch, terms, 10 * values)
    expected = {0: 0.0, 1: 1.0, 3: 3.0}[count]
    assert metrics["kl"].item() == pytest.approx(expected)
    assert metrics["entropy"].item() == pytest.approx(10 * expected)
    assert metrics["vespo/phi_seq_mean"].item() == 3.0
    by_token = named_metrics(
        GRPOObjective(loss_type="vespo"), batch, terms_of(torch.ones(1, 4), phi=values), entropies=None
    )
    assert by_token["vespo/phi_seq_mean"].item() == pytest.approx(expected)
    without = named_metrics(GRPOObjective(loss_type="vespo", beta=0.1), batch, terms._replace(kl=None), None)
    assert without["kl"].item() == 0.0
    assert "entropy" not in without
