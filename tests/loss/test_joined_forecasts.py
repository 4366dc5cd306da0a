"""Forecasts of several micro-batches that share a forward: one common factor, whatever the normalizer of each is."""

from dataclasses import replace

import pytest
import torch

from tests.oracle import relative_error
from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.forecast import BatchForecast, forecast, grad_rows_first
from trl_fused_grpo.loss.importance_sampling import SamplingCorrection
from trl_fused_grpo.loss.objective import GRPOObjective, token_terms
from trl_fused_grpo.loss.reduction import reduce_loss

from .test_objective import ADVANTAGES, ENTROPIES, LOGPS, MASK, OLD, REF, randn


SAMPLING = LOGPS + 0.2 * randn(*LOGPS.shape, seed=9)
# Rows of each micro-batch, and what its loss is divided by. Units are powers of two: 3 and 300 give different ones
PARTS = ((slice(0, 2), 3.0), (slice(2, 4), 300.0), (slice(4, 5), 40.0))

# name: (options, whether old log-probs are given)
OBJECTIVES = {
    "on-policy": ({"loss_type": "dapo"}, False),
    "on-policy-kl": ({"loss_type": "dapo", "beta": 0.2}, False),
    "off-policy": ({"loss_type": "grpo", "beta": 0.1}, True),
    "entropy-bonus": ({"loss_type": "dapo", "entropy_coef": 0.1}, True),
    "sequence-level": ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, True),
    "sequence-level-entropy-bonus": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "entropy_coef": 0.1},
        True,
    ),
}


def batch_of(rows, normalizer, is_off_policy, ratio=None):
    return GRPOBatch(
        MASK[rows],
        ADVANTAGES[rows].unsqueeze(1),
        old_per_token_logps=OLD[rows] if is_off_policy else None,
        ref_per_token_logps=REF[rows],
        importance_sampling_ratio=ratio,
        normalizer=normalizer,
        entropy_normalizer=torch.tensor(2 * normalizer),
    )


def gradients_of(objective, batches):
    """Gradients `[B, T]` of the sum of the losses with respect to log-probabilities and entropies."""
    logps, entropies = LOGPS.clone().requires_grad_(), ENTROPIES.clone().requires_grad_()
    total = 0.0
    for (rows, _), batch in zip(PARTS, batches, strict=True):
        terms = token_terms(objective, batch, logps[rows], entropies[rows])
        total = total + reduce_loss(objective, batch, terms.loss, entropies[rows])
    grads = torch.autograd.grad(total, (logps, entropies), allow_unused=True)
    return grads[0], torch.zeros_like(LOGPS) if grads[1] is None else grads[1]


def assert_is_forecast(joined, truths):
    """The forecast of all rows is the gradient up to one factor, which log-probabilities and entropies share."""
    positions, grad_rows = grad_rows_first(MASK.bool(), joined.needs_grad)
    rows = joined.at(positions, grad_rows)
    assert rows.grad_rows == grad_rows
    found = rows(slice(0, grad_rows), LOGPS.flatten()[positions[:grad_rows]], None)
    truth = [gradient.flatten()[positions] for gradient in truths]
    assert not any(gradient[grad_rows:].any() for gradient in truth)
    values = torch.cat([grad for grad in found if grad is not None]).double()
    expected = torch.cat([grad[:grad_rows] for grad, mine in zip(truth, found, strict=True) if mine is not None])
    factor = (expected.double() @ values) / (values @ values)
    assert relative_error(values * factor, expected) < 2e-6


@pytest.mark.parametrize("name", OBJECTIVES)
def test_joined_forecasts_have_one_common_factor(name):
    options, is_off_policy = OBJECTIVES[name]
    objective = GRPOObjective(**options)
    batches = [batch_of(rows, normalizer, is_off_policy) for rows, normalizer in PARTS]
    parts = [forecast(objective, batch) for batch in batches]
    units = [part.unit.item() for part in parts]
    assert len(set(units)) == len(PARTS)
    joined = type(parts[0]).joined(parts)
    assert_is_forecast(joined, gradients_of(objective, batches))
    assert torch.equal(joined.needs_grad, torch.cat([part.needs_grad for part in parts]))
    assert joined.unit.item() == min(units)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_micro_batch_alone_keeps_its_forecast(name):
    options, is_off_policy = OBJECTIVES[name]
    batch = batch_of(slice(None), 3.0, is_off_policy)
    part = forecast(GRPOObjective(**options), batch)
    positions, grad_rows = grad_rows_first(MASK.bool(), part.needs_grad)
    grads = [
        whole.at(positions, grad_rows)(slice(0, grad_rows), LOGPS.flatten()[positions[:grad_rows]], None)
        for whole in (part, type(part).joined([part]))
    ]
    for alone, joined in zip(*grads, strict=True):
        assert alone is joined is None or torch.equal(alone, joined)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_joined_forecasts_whose_ratio_is_computed_in_training(mode, beta):
    objective = GRPOObjective(loss_type="dapo", beta=beta)
    correction = SamplingCorrection(mode, 0.9, 1.1, nan_ratio_is_one=True)
    batches, parts = [], []
    for rows, normalizer in PARTS:
        ratio = correction.ratio(LOGPS[rows], SAMPLING[rows], MASK[rows])
        batches.append(batch_of(rows, normalizer, False, ratio))
        batch = replace(batch_of(rows, normalizer, False), sampling_per_token_logps=SAMPLING[rows])
        parts.append(forecast(objective, batch, correction))
    assert_is_forecast(BatchForecast.joined(parts), gradients_of(objective, batches))
