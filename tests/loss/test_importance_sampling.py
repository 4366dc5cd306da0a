"""The sampler's importance ratios by hand: sums of sequences, bounds, tokens without a log-prob; and their metrics."""

import math
from types import SimpleNamespace

import pytest
import torch

from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics


NAN = float("nan")
# log-ratios of three sequences; the last token of the first two does not count
LOG_RATIOS = torch.tensor([[0.1, 0.5, 9.0], [-0.2, -0.7, 9.0], [0.0, 0.3, -0.1]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
BOUNDS = [(None, None), (0.6, None), (None, 1.5), (0.6, 1.5), (math.exp(0.3), math.exp(0.5))]


def expected_ratio(log_ratio, mode, low, high):
    ratio = math.exp(log_ratio)
    is_low, is_high = low is not None and ratio < low - 1e-6, high is not None and ratio > high + 1e-6
    if mode.endswith("truncate"):
        return low if is_low else high if is_high else ratio
    return 0.0 if is_low or is_high else ratio


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_ratios_are_those_of_tokens_or_of_whole_sequences_within_the_bounds(mode, low, high):
    if low is None and high is None and mode.endswith("truncate"):
        pytest.skip("TRL refuses to clamp to no bound")
    logps = torch.full((3, 3), -2.0)
    found = SamplingCorrection(mode, low, high, nan_ratio_is_one=True).ratio(logps, logps - LOG_RATIOS, MASK)
    counted = LOG_RATIOS * MASK
    rows = counted.sum(1, keepdim=True).tolist() if mode.startswith("sequence") else counted.tolist()
    expected = [[expected_ratio(value, mode, low, high) for value in row] for row in rows]
    assert found.shape == (3, 1 if mode.startswith("sequence") else 3)
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-5)


@pytest.mark.parametrize(("mode", "on_it"), [("token_mask", 2.0), ("token_mask", 0.5), ("sequence_mask", 2.0)])
def test_a_ratio_on_a_bound_is_kept(mode, on_it):
    low, high = (on_it, None) if on_it < 1 else (None, on_it)
    logps = torch.tensor([[0.0]], dtype=torch.float64)
    sampling = -torch.tensor([[on_it]], dtype=torch.float64).log()
    correction = SamplingCorrection(mode, low, high, nan_ratio_is_one=True)
    exact = (logps - sampling).exp().item()
    correction = SamplingCorrection(mode, low and exact, high and exact, nan_ratio_is_one=True)
    assert correction.ratio(logps, sampling, torch.ones(1, 1)).item() == exact


def test_a_token_without_a_sampling_log_prob_has_ratio_one_or_none():
    logps, sampling = torch.tensor([[0.0, 1.0]]), torch.tensor([[NAN, 0.0]])
    mask = torch.ones(1, 2)
    by_token = SamplingCorrection("token_truncate", None, 9.0, nan_ratio_is_one=True).ratio(logps, sampling, mask)
    assert torch.allclose(by_token, torch.tensor([[1.0, math.e]]))
    by_sequence = SamplingCorrection("sequence_mask", None, 9.0, nan_ratio_is_one=True).ratio(logps, sampling, mask)
    assert torch.allclose(by_sequence, torch.tensor([[math.e]]))
    as_before = SamplingCorrection("token_truncate", None, 9.0, nan_ratio_is_one=False).ratio(logps, sampling, mask)
    assert as_before[0, 0].isnan()


def gathered(correction, *processes: SamplingMetrics) -> dict[str, float]:
    """The metrics of several processes."""
    tables: list[torch.Tensor] = []
    for metrics in processes:
        metrics.gathered(SimpleNamespace(gather=lambda table: tables.append(table) or table), correction)
    return processes[0].gathered(SimpleNamespace(gather=lambda _: torch.cat(tables)), correction)


def metrics_of(correction, logps, sampling, mask) -> SamplingMetrics:
    metrics = SamplingMetrics()
    metrics.add(0, logps, sampling, mask, correction.ratio(logps, sampling, mask))
    return metrics


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_metrics_are_means_greatest_and_least_over_what_counts(mode):
    correction = SamplingCorrection(mode, None, 1.5, nan_ratio_is_one=True)
    logps = torch.full((3, 3), -2.0)
    sampling = logps - LOG_RATIOS
    sampling[2, 0] = NAN
    ratio = correction.ratio(logps, sampling, MASK)
    metrics = SamplingMetrics()
    for place, rows in enumerate((slice(0, 2), slice(2, 3))):
        metrics.add(place, logps[rows], sampling[rows], MASK[rows], ratio[rows])
    found = gathered(correction, metrics)
    differences = [0.1, 0.5, 0.2, 0.7, 0.3, 0.1]
    ratios = ratio[:, 0].tolist() if mode.startswith("sequence") else ratio[MASK.bool()].tolist()
    expected = [sum(differences) / 6, 0.7, min(ratios), sum(ratios) / len(ratios), max(ratios)]
    assert list(found) == list(SAMPLING_METRICS)
    assert list(found.values()) == [pytest.approx(value, rel=1e-5) for value in expected]


def test_a_process_without_tokens_that_count_adds_zeros_as_in_trl():
    correction = SamplingCorrection("token_truncate", None, 9.0, nan_ratio_is_one=True)
    logps = torch.full((3, 3), -2.0)
    mask = MASK * torch.tensor([[1], [0], [0]])
    sampling, rows_of = logps - LOG_RATIOS, (slice(0, 1), slice(1, 3))
    found = gathered(correction, *(metrics_of(correction, logps[rows], sampling[rows], mask[rows]) for rows in rows_of))
    ratios = [math.exp(0.1), math.exp(0.5)]
    expected = [0.3 / 2, 0.5, 0.0, sum(ratios) / 2 / 2, max(ratios)]
    assert list(found.values()) == [pytest.approx(value, rel=1e-5) for value in expected]


def test_ratios_that_are_no_numbers_on_one_process_leave_those_of_the_others():
    correction = SamplingCorrection("token_truncate", None, 9.0, nan_ratio_is_one=False)
    logps = torch.full((2, 3), -2.0)
    sampling, rows_of = logps - LOG_RATIOS[:2], (slice(0, 1), slice(1, 2))
    sampling[1] = NAN
    found = gathered(correction, *(metrics_of(correction, logps[rows], sampling[rows], MASK[rows]) for rows in rows_of))
    ratios = [math.exp(0.1), math.exp(0.5)]
    differences, greatest, *of_ratios = found.values()
    assert math.isnan(differences)
    assert math.isnan(greatest)
    assert of_ratios == [pytest.approx(value, rel=1e-5) for value in (min(ratios), sum(ratios) / 2, max(ratios))]
    none_is = gathered(correction, metrics_of(correction, logps[1:], sampling[1:], MASK[1:2]))
    assert all(math.isnan(value) for value in none_is.values())


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_sequences_that_are_left_out_do_not_count(mode):
    correction = SamplingCorrection(mode, None, 9.0, nan_ratio_is_one=True)
    logps = torch.full((3, 3), -2.0)
    sampling = logps - LOG_RATIOS
    ratio = correction.ratio(logps, sampling, MASK)
    tensors = logps, sampling, MASK, ratio
    found = []
    for rows, left_out in ((slice(None), torch.tensor([False, True, False])), ([0, 2], None)):
        metrics = SamplingMetrics()
        metrics.add(0, *(tensor[rows] for tensor in tensors), left_out)
        found.append(gathered(correction, metrics))
    assert found[0] == found[1]
