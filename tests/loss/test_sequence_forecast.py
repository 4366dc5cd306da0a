"""The forecast of whole sequences: who needs a gradient, how parts are joined, and ratios that it computes itself."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.oracle import relative_error
from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.forecast import BatchForecast, forecast
from trl_fused_grpo.loss.importance_sampling import SamplingCorrection
from trl_fused_grpo.loss.objective import GRPOObjective, token_terms

from .test_objective import LOGPS, MASK, OLD, REF, randn


B, T = MASK.shape
ADVANTAGES = torch.tensor([[1.3], [-0.7], [0.4], [0.9], [-2.1]])
SAMPLING = LOGPS + 0.2 * randn(B, T, seed=9)
SEQUENCE_LEVEL = GRPOObjective(loss_type="dapo", importance_sampling_level="sequence")
ONE = torch.tensor(1.0)


def batch_of(rows=slice(None), **options):
    given = {"old_per_token_logps": OLD[rows], **options}
    return GRPOBatch(MASK[rows], ADVANTAGES[rows], **given)


def forecast_of(objective, batch, weights=None, entropy_grads=None, correction=None):
    weights = batch.mask.float() / 7 if weights is None else weights
    return BatchForecast(objective, batch, ONE, weights, entropy_grads, correction=correction)


def sequences_that_need_grad(forecast):
    """Which sequences do; all of their tokens that count do then, and nothing else."""
    needs = forecast.needs_grad
    each = needs.any(1)
    assert torch.equal(needs, each[:, None] & (forecast.batch.mask != 0))
    return each.tolist()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sequence_needs_a_gradient_where_any_of_its_factors_is_not_zero(level):
    objective = GRPOObjective(loss_type="dapo", importance_sampling_level=level, off_policy_mask_threshold=9.0)
    batch, weights = batch_of(), MASK / 7
    assert sequences_that_need_grad(forecast_of(objective, batch)) == [True] * B
    without_weight = weights.clone()
    without_weight[1], without_weight[3, 1:] = 0.0, 0.0
    assert sequences_that_need_grad(forecast_of(objective, batch, without_weight)) == [True, False, True, True, True]
    of_one = torch.where(MASK != 0, 1.0, 0.0)
    assert sequences_that_need_grad(forecast_of(objective, batch, of_one)) == [True] * B
    zero = replace(batch, advantages=torch.tensor([[0.0], [1.0], [0.0], [-1.0], [1.0]]))
    assert sequences_that_need_grad(forecast_of(objective, zero)) == [False, True, False, True, True]
    ratio = replace(batch, importance_sampling_ratio=torch.tensor([[1.0], [0.0], [1.0], [0.5], [0.0]]))
    assert sequences_that_need_grad(forecast_of(objective, ratio)) == [True, False, True, True, False]
    neither = replace(ratio, advantages=zero.advantages)
    assert sequences_that_need_grad(forecast_of(objective, neither)) == [False, False, False, True, False]


def test_vespo_takes_the_ratio_into_its_weight():
    batch = batch_of(importance_sampling_ratio=torch.tensor([[1.0], [0.0], [1.0], [0.5], [0.0]]))
    assert sequences_that_need_grad(forecast_of(GRPOObjective(loss_type="vespo"), batch)) == [True] * B


def test_kl_and_entropies_need_gradients_without_an_advantage():
    batch = replace(batch_of(ref_per_token_logps=REF), advantages=torch.zeros(B, 1))
    weights = MASK / 7
    weights[2] = 0.0
    with_kl = replace(SEQUENCE_LEVEL, beta=0.1)
    assert sequences_that_need_grad(forecast_of(SEQUENCE_LEVEL, batch, weights)) == [False] * B
    assert sequences_that_need_grad(forecast_of(with_kl, batch, weights)) == [True, True, False, True, True]
    assert sequences_that_need_grad(forecast_of(with_kl, batch, 7 * weights)) == [True, True, False, True, True]
    entropy_grads = torch.zeros(B, T)
    entropy_grads[2, 0], entropy_grads[4] = -1.0, 1.0
    found = forecast_of(SEQUENCE_LEVEL, batch, weights, entropy_grads)
    assert sequences_that_need_grad(found) == [False, False, True, False, True]
    assert found.entropy_grads is entropy_grads


def test_what_does_not_count_needs_no_gradient():
    batch = replace(batch_of(), mask=MASK * torch.tensor([[1], [0], [1], [1], [0]]))
    found = forecast_of(SEQUENCE_LEVEL, batch, torch.ones(B, T))
    assert sequences_that_need_grad(found) == [True, False, True, True, False]


def gradients_by_autograd(objective, batch, correction, weights, old):
    """Of the loss of all sequences with respect to the log-probs of tokens that count; others are as in the trainer."""
    base = torch.zeros(B, T) if old is None else old
    leaf = torch.where(MASK != 0, LOGPS, base).requires_grad_()
    if correction is not None:
        ratio = correction.ratio(leaf.detach(), batch.sampling_per_token_logps, batch.mask)
        batch = replace(batch, importance_sampling_ratio=ratio)
    return torch.autograd.grad((token_terms(objective, batch, leaf).loss * weights).sum(), leaf)[0]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", None])
@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [1, 3, 4], [4]])
def test_gradients_of_some_sequences_are_those_of_the_whole_loss(chosen, is_off_policy, mode):
    correction = None if mode is None else SamplingCorrection(mode, 0.9, 1.4, nan_ratio_is_one=True)
    old = OLD if is_off_policy else None
    given = {} if mode is None else {"sampling_per_token_logps": SAMPLING}
    batch = GRPOBatch(MASK, ADVANTAGES, old_per_token_logps=old, **given)
    weights = MASK / torch.tensor([[7.0], [4.0], [3.0], [2.0], [9.0]])
    expected = gradients_by_autograd(SEQUENCE_LEVEL, batch, correction, weights, old)
    found = forecast_of(SEQUENCE_LEVEL, batch, weights, correction=correction)
    counts = MASK.flatten().nonzero().squeeze(1)
    index = counts[torch.isin(counts // T, torch.tensor(chosen))]
    rows = found.at(index, len(index))
    grads, _ = rows(slice(0, len(index)), LOGPS.flatten()[index], None)
    assert relative_error(grads, expected.flatten()[index]) < 1e-6
    half, _ = rows(slice(0, len(index)), LOGPS.flatten()[index].double(), None)
    assert half.dtype == torch.float64


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sequence_s_ratio_multiplies_the_gradient_at_ratio_one(mode, loss_type, level):
    """Without autograd for each block of rows; token advantages and an entropy bonus as well."""
    if level == "sequence" and loss_type != "grpo":
        pytest.skip("TRL has no such objective")
    correction = SamplingCorrection(mode, 0.9, 1.1, nan_ratio_is_one=True)
    objective = GRPOObjective(loss_type=loss_type, importance_sampling_level=level, entropy_coef=0.1, epsilon_high=5.0)
    advantages = ADVANTAGES * (1 + 0.1 * randn(B, T, seed=3))
    sampling = SAMPLING.clone()
    sampling[0, 0] = float("nan")
    batch = GRPOBatch(MASK, advantages, sampling_per_token_logps=sampling, entropy_normalizer=torch.tensor(3.0))
    found = forecast(objective, batch, correction)
    assert not found.by_token
    expected = gradients_by_autograd(objective, batch, correction, found.weights, None).flatten()
    index = MASK.flatten().nonzero().squeeze(1)
    rows = found.at(index, len(index))
    begin, ratios = 0, correction.ratio(LOGPS, sampling, MASK)
    assert len(ratios.unique()) > 1
    for end in (*rows.groups.ends[1::2], len(index)):  # two sequences at a time, then the last
        with mock.patch.object(torch.autograd, "grad", side_effect=AssertionError):
            grads, entropies = rows(slice(begin, end), LOGPS.flatten()[index[begin:end]], None)
        assert relative_error(grads, expected[index[begin:end]]) < 1e-6
        assert torch.equal(entropies, found.entropy_grads.flatten()[index[begin:end]])
        begin = end


def test_a_ratio_that_is_to_be_computed_needs_the_sampler_s_log_probs():
    correction = SamplingCorrection("sequence_mask", None, 3.0, nan_ratio_is_one=True)
    found = forecast_of(SEQUENCE_LEVEL, batch_of(), correction=correction)
    with pytest.raises(AssertionError, match=r"^the ratio needs the sampler's log-probabilities$"):
        found.gradients(torch.tensor([0]), torch.zeros(1))


@pytest.mark.parametrize("has_entropies", [False, True])
def test_parts_are_joined_with_all_that_they_have(has_entropies):
    correction = SamplingCorrection("sequence_mask", None, 3.0, nan_ratio_is_one=True)
    other = SamplingCorrection("token_mask", 0.5, None, nan_ratio_is_one=False)
    parts = []
    for rows, unit, objective, its in (
        (slice(0, 2), 4.0, SEQUENCE_LEVEL, correction),
        (slice(2, 5), 0.5, replace(SEQUENCE_LEVEL, epsilon_low=0.1), other),
    ):
        entropy_grads = unit * MASK[rows] / 3 if has_entropies else None
        options = {"accumulation": unit, "normalizer": torch.tensor([3.0])}
        batch = batch_of(rows, sampling_per_token_logps=SAMPLING[rows], **options)
        weights, unit = unit * MASK[rows] / 7, torch.tensor(unit)
        part = BatchForecast(objective, batch, unit, weights, entropy_grads, correction=its)
        parts.append(part)
    joined = BatchForecast.joined(parts)
    assert joined.unit.item() == 0.5
    assert joined.objective is parts[0].objective
    assert joined.correction is correction
    assert torch.equal(joined.needs_grad, MASK != 0)
    assert torch.allclose(joined.weights, 0.5 * MASK / 7)
    assert (joined.entropy_grads is not None) == has_entropies
    assert not has_entropies or torch.allclose(joined.entropy_grads, 0.5 * MASK / 3)
    for name, whole in (("mask", MASK), ("advantages", ADVANTAGES), ("old_per_token_logps", OLD)):
        assert torch.equal(getattr(joined.batch, name), whole), name
    assert torch.equal(joined.batch.sampling_per_token_logps, SAMPLING)
    assert joined.batch.accumulation == parts[0].batch.accumulation
    assert joined.batch.normalizer is parts[0].batch.normalizer


@pytest.mark.parametrize("has_entropies", [False, True])
def test_rows_come_in_groups_that_know_whether_their_gradients_are_equal(has_entropies):
    entropy_grads = MASK / 3 if has_entropies else None
    found = forecast_of(SEQUENCE_LEVEL, batch_of(), entropy_grads=entropy_grads)
    index = MASK.flatten().nonzero().squeeze(1)
    rows = found.at(index, len(index))
    assert rows.groups.have_equal_grads is (not has_entropies)
    assert rows.groups.ends == MASK.sum(1).cumsum(0).tolist()
    whole, _ = rows(slice(0, len(index)), LOGPS.flatten()[index], None)
    begin = 0
    for end in rows.groups.ends:  # a chunk of one sequence, and one that begins or ends with it
        alone, entropies = rows(slice(begin, end), LOGPS.flatten()[index[begin:end]], None)
        assert torch.allclose(alone, whole[begin:end], rtol=1e-5)
        assert (entropies is not None) == has_entropies
        assert not has_entropies or torch.allclose(entropies, torch.full((end - begin,), 1 / 3))
        up_to_here, _ = rows(slice(0, end), LOGPS.flatten()[index[:end]], None)
        assert torch.allclose(up_to_here, whole[:end], rtol=1e-5)
        begin = end


def test_a_chunk_computes_the_gradients_of_its_own_sequences_alone():
    found = forecast_of(SEQUENCE_LEVEL, batch_of())
    index = MASK.flatten().nonzero().squeeze(1)
    rows = found.at(index, len(index))
    ends = [0, *rows.groups.ends]
    of = BatchForecast.of
    for first in range(B):
        for last in range(first + 1, B + 1):
            chunk = slice(ends[first], ends[last])
            with mock.patch.object(BatchForecast, "of", autospec=True, side_effect=of) as computed:
                rows(chunk, LOGPS.flatten()[index[chunk]], None)
            assert computed.call_args.args[1] == slice(first, last)
