"""Numbers of single sequences, by hand: VESPO's weights and their bounds, masks of sequences and tokens, the bonus."""

import math

import pytest
import torch

from trl_fused_grpo.loss.batch import GRPOBatch, zero_masked
from trl_fused_grpo.loss.objective import (
    GRPOObjective,
    gamma_weights,
    high_entropy_mask,
    off_policy_mask,
)
from trl_fused_grpo.loss.reduction import entropy_weights


VESPO = GRPOObjective(loss_type="vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=0.5, vespo_lambda_neg=0.5)


def phi(log_w, k, lam):
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    return math.exp(lam + k * log_w - lam * math.exp(log_w))


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.0, 2.0, 3.0), (0.0, 2.0, 3.0), (-1.0, 0.5, 0.5)])
@pytest.mark.parametrize(
    ("log_ratio", "ratio", "log_w"),
    [
        ([0.1, 0.2, 9.0], None, 0.3),  # the last token does not count
        ([-30.0, 18.0, 0.0], None, -2.0),  # each token between -20 and 20
        ([30.0, -22.0, 0.0], None, 0.0),
        ([-30.0, -30.0, 0.0], None, -40.0),
        ([0.1, 0.0, 0.0], [1.5, 0.5, 1.0], 0.1 + math.log(0.75)),
        ([15.0, 0.0, 0.0], [0.0, 1.0, 1.0], 15.0 + math.log(1e-8)),  # a ratio of zero has a bound too
        ([-19.0, 0.0, 0.0], [math.inf, 1.0, 1.0], 1.0),
    ],
)
def test_vespo_weighs_a_sequence_by_its_bounded_ratio(advantage, k, lam, log_ratio, ratio, log_w):
    batch = GRPOBatch(
        torch.tensor([[1, 1, 0]]),
        torch.tensor([[advantage]]),
        importance_sampling_ratio=None if ratio is None else torch.tensor([ratio]),
    )
    weights = gamma_weights(VESPO, batch, torch.tensor([log_ratio]))
    assert weights.shape == (1, 1)
    assert weights.item() == pytest.approx(phi(log_w, k, lam), rel=1e-4, abs=1e-30)


def test_a_weight_that_is_no_number_is_zero():
    batch = GRPOBatch(torch.ones(2, 1), torch.tensor([[1.0], [-1.0]]))
    weights = gamma_weights(VESPO, batch, torch.tensor([[math.nan], [0.0]]))
    assert weights.tolist() == [[0.0], [pytest.approx(1.0)]]
    infinite = GRPOObjective(loss_type="vespo", vespo_lambda_pos=200.0)
    assert gamma_weights(infinite, batch, torch.tensor([[-5.0], [0.0]]))[0].item() == 0.0


@pytest.mark.parametrize(
    ("advantage", "log_ratios", "counts"),
    [
        (-1.0, [0.25, 0.5, 99.0], True),  # mean 0.375 of two tokens: on the threshold
        (-1.0, [0.25, 0.625, -99.0], False),
        (-1.0, [math.nan, 0.75, 0.0], True),  # a token that the sampler gave no log-prob counts as zero
        (-1.0, [math.nan, 0.875, 0.0], False),
        (0.0, [5.0, 5.0, 0.0], True),
        (0.5, [5.0, 5.0, 0.0], True),
    ],
)
def test_the_off_policy_mask_is_of_a_mean_over_the_tokens_that_count(advantage, log_ratios, counts):
    objective = GRPOObjective(off_policy_mask_threshold=0.375)
    batch = GRPOBatch(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[advantage], [-1.0]]))
    mask = off_policy_mask(objective, batch, torch.tensor([log_ratios, [0.5, 0.0, 0.0]]))
    assert mask.tolist() == [[counts], [False]]


def test_high_entropy_counts_the_quantile_itself_and_no_masked_token():
    entropies = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    found = high_entropy_mask(entropies, mask, 0.5)
    assert found.dtype == torch.bool
    assert found.tolist() == [[False, False, True, True, True, False]]
    nothing = high_entropy_mask(entropies, torch.zeros_like(mask), 0.5)
    assert nothing.dtype == torch.bool
    assert nothing.shape == mask.shape and not nothing.any()


@pytest.mark.parametrize(
    ("mask", "normalizer", "accumulation", "expected"),
    [
        ([[1.0, 1.0, 0.0]], None, 1, [[-0.05, -0.05, 0.0]]),
        ([[1.0, 1.0, 0.0]], None, 4, [[-0.0125, -0.0125, 0.0]]),
        ([[1.0, 1.0, 0.0]], 10.0, 4, [[-0.01, -0.01, 0.0]]),
        ([[1.0, 0.0, 0.0]], None, 1, [[-0.1, 0.0, 0.0]]),
        ([[0.0, 0.0, 0.0]], None, 1, [[0.0, 0.0, 0.0]]),
    ],
)
def test_the_entropy_bonus_is_a_mean_over_tokens(mask, normalizer, accumulation, expected):
    mask = torch.tensor(mask)
    normalizer = None if normalizer is None else torch.tensor(normalizer)
    batch = GRPOBatch(mask, torch.ones(1, 1), accumulation=accumulation, entropy_normalizer=normalizer)
    weights = entropy_weights(GRPOObjective(entropy_coef=0.1), batch)
    assert torch.allclose(weights, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_masked_is_zero_whatever_stands_there(dtype):
    mask = torch.tensor([[True, True, False], [False, True, True]])
    values = torch.tensor([[1.5, -2.0, math.nan], [math.inf, 0.5, 3.0]], dtype=dtype).requires_grad_()
    found = zero_masked(values, mask)
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    assert found.tolist() == [[1.5, -2.0, 0.0], [0.0, 0.5, 3.0]]
    of_sequences = zero_masked(values[:, 1], mask)
    assert of_sequences.tolist() == [[-2.0], [0.5]]
    assert zero_masked(None, mask) is None
