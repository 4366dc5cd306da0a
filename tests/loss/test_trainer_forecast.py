"""What is forecast for the trainer, against a float64 oracle; what it asks of the fused head."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.grpo_oracle import grpo_loss
from tests.oracle import relative_error
from trl_fused_grpo import FusedLinearGRPOLoss
from trl_fused_grpo.loss import liger_loss, selected_logps
from trl_fused_grpo.loss.batch import GRPOBatch, as_columns
from trl_fused_grpo.loss.forecast import forecast, grad_rows_first
from trl_fused_grpo.loss.importance_sampling import SamplingCorrection
from trl_fused_grpo.loss.objective import GRPOObjective

from .test_objective import ADVANTAGES, ENTROPIES, IS_RATIO, LOGPS, MASK, OLD, REF, randn


SAMPLING = LOGPS + 0.2 * randn(*LOGPS.shape, seed=9)
CORRECTION = SamplingCorrection("sequence_truncate", None, 1.1, nan_ratio_is_one=True)
NAMES = {"old_per_token_logps": "old", "ref_per_token_logps": "ref", "vllm_is_ratio": "is_ratio"}
NAMES |= {"sampling_per_token_logps": "sampling", "normalizer": "normalizer"}
KL = {"old_per_token_logps": OLD, "ref_per_token_logps": REF}

# name: (options, inputs)
CASES = {
    "tokens-of-the-step": ({"loss_type": "dapo"}, {"normalizer": 31.0, "accumulation": 4.0}),
    "tokens-of-one": ({"loss_type": "dapo"}, {}),
    "accumulation": ({"loss_type": "grpo"}, {"normalizer": 31.0, "accumulation": 4.0}),
    "no-accumulation": ({"loss_type": "grpo"}, {}),
    "ratio": ({"loss_type": "grpo"}, {"old_per_token_logps": OLD, "vllm_is_ratio": IS_RATIO}),
    "kl": ({"loss_type": "grpo", "beta": 0.2}, {**KL, "vllm_is_ratio": IS_RATIO[:, :1]}),
    "off-policy-mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"old_per_token_logps": OLD, "sampling_per_token_logps": SAMPLING},
    ),
    "correction": ({"loss_type": "grpo"}, {"sampling_per_token_logps": SAMPLING, "correction": CORRECTION}),
    "entropy-bonus": ({"loss_type": "grpo", "entropy_coef": 0.1}, {"entropy_normalizer": 23.0, "accumulation": 4.0}),
}


def truths(options, inputs):
    """The gradients of log-probabilities and entropies, in float64."""
    logps, entropies = LOGPS.double().requires_grad_(), ENTROPIES.double()
    given = {NAMES[name]: value for name, value in inputs.items() if name in NAMES}
    accumulation = inputs.get("accumulation", 1.0)
    if options["loss_type"] == "dapo":
        given["normalizer"], accumulation = inputs.get("normalizer", 1.0), 1.0
    else:
        given.pop("normalizer", None)
    if "correction" in inputs:
        given["is_ratio"] = CORRECTION.ratio(LOGPS, given.pop("sampling"), MASK)
    loss, _ = grpo_loss({**options, "entropy_coef": 0.0}, logps, MASK, ADVANTAGES, entropies=entropies, **given)
    of_entropies = -options.get("entropy_coef", 0.0) * MASK / inputs.get("entropy_normalizer", 1.0)
    return torch.autograd.grad(loss / accumulation, logps)[0], of_entropies


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_for_the_trainer_is_the_gradient_of_the_oracle_in_its_unit(name):
    options, inputs = CASES[name]
    objective = GRPOObjective(**options)
    is_global = objective.uses_global_normalizer
    batch = GRPOBatch(
        MASK,
        as_columns(ADVANTAGES),
        inputs.get("old_per_token_logps"),
        inputs.get("ref_per_token_logps"),
        inputs.get("vllm_is_ratio"),
        inputs.get("sampling_per_token_logps"),
        normalizer=inputs.get("normalizer", 1.0) if is_global else None,
        accumulation=1.0 if is_global else inputs.get("accumulation", 1.0),
        entropy_normalizer=inputs.get("entropy_normalizer"),
    )
    made = forecast(objective, batch, inputs.get("correction"))
    positions, grad_rows = grad_rows_first(MASK.bool(), made.needs_grad)
    logps = LOGPS.flatten()[positions[:grad_rows]]
    found = made.at(positions, grad_rows)(slice(0, grad_rows), logps, None)
    for grads, truth in zip(found, truths(options, inputs), strict=True):
        expected = truth.flatten()[positions]
        assert not expected[grad_rows:].any()
        if grads is None:
            assert not expected.any()
        else:
            assert relative_error(grads / made.unit, expected[:grad_rows]) < 2e-6


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize(
    ("options", "return_outputs", "entropies"),
    [({}, False, False), ({}, True, True), ({"top_entropy_quantile": 0.5}, False, True)],
)
def test_entropies_and_forecasts_are_computed_where_they_are_needed_alone(
    options, return_outputs, entropies, with_grad
):
    hidden, weight = randn(*MASK.shape, 8), randn(11, 8, seed=1).requires_grad_()
    loss_fn, ids = FusedLinearGRPOLoss(beta=0.0, **options), torch.zeros_like(MASK)
    compute, expect = selected_logps.fused_linear_logps, liger_loss.forecast
    with (
        torch.set_grad_enabled(with_grad),
        mock.patch.object(selected_logps, "fused_linear_logps", side_effect=compute) as computed,
        mock.patch.object(liger_loss, "forecast", side_effect=expect) as expected,
    ):
        loss_fn(hidden, weight, ids, MASK, ADVANTAGES, return_outputs=return_outputs)
    assert computed.call_args.kwargs["entropy"] is entropies
    assert expected.called is with_grad


def test_hidden_states_are_copied_where_their_order_or_number_changes_alone():
    hidden, weight = randn(*MASK.shape, 8), randn(11, 8, seed=1).requires_grad_()
    ids, whole = torch.zeros_like(MASK), torch.ones_like(MASK)
    one = torch.zeros(MASK.shape)
    one[2, 3] = 1.0  # the only row with a gradient, which is then the first
    loss_fn, compute = FusedLinearGRPOLoss(beta=0.0), selected_logps.fused_linear_logps
    cases = ((whole, whole.float(), False), (whole, 0 * one, False), (whole, one, True), (MASK, MASK.float(), True))
    for mask, advantages, is_copied in cases:
        with mock.patch.object(selected_logps, "fused_linear_logps", side_effect=compute) as computed:
            loss, _ = loss_fn(hidden, weight, ids, mask, advantages)
        assert (computed.call_args.args[0].data_ptr() != hidden.data_ptr()) == is_copied
        leaf = weight.detach().double().requires_grad_()
        logps = (hidden.double() @ leaf.T).log_softmax(-1)[..., 0]
        expected = torch.autograd.grad(-(logps * advantages).sum() / mask.sum(), leaf)[0]
        assert relative_error(torch.autograd.grad(loss, weight)[0], expected) < 2e-6


def test_padding_counts_in_luspo_for_one_sequence_of_two_positions():
    options = {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0}
    tensors = randn(1, 2, 8), randn(11, 8, seed=1), torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1, 0]])
    ratio = torch.tensor([[0.5, 2.0]])
    loss, _ = FusedLinearGRPOLoss(**options)(*tensors, torch.tensor([1.4]), vllm_is_ratio=ratio)
    assert loss.item() == pytest.approx(-1.4 * ratio.mean().item())  # times a length of one


def test_its_attributes_are_its_options_and_not_itself():
    assert not hasattr(FusedLinearGRPOLoss(), "self")


def test_off_policy_a_position_needs_a_gradient_where_no_factor_is_zero():
    advantages, ratio = torch.tensor([[0.0], [1.0], [-1.0], [2.0], [1.0]]), IS_RATIO.clone()
    ratio[1, 0] = ratio[3, 2] = 0.0
    batch = GRPOBatch(MASK, advantages, old_per_token_logps=OLD, importance_sampling_ratio=ratio)
    expected = (MASK != 0) & (advantages != 0) & (ratio != 0)
    assert torch.equal(forecast(GRPOObjective(), batch).needs_grad, expected)
    with_kl = forecast(GRPOObjective(beta=0.1), replace(batch, ref_per_token_logps=REF))
    assert torch.equal(with_kl.needs_grad, MASK != 0)
