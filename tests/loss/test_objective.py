"""The objectives in plain torch and the forecast of their gradients, against a float64 oracle."""

import re

import pytest
import torch

from tests.grpo_oracle import grpo_loss
from tests.oracle import relative_error
from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.forecast import forecast, grad_rows_first
from trl_fused_grpo.loss.objective import KL_ESTIMATORS, LOSS_TYPES, GRPOObjective, kl_loss, token_terms
from trl_fused_grpo.loss.reduction import reduce_loss, token_weights
from trl_fused_grpo.ops.forecast import groups_of


B, T = 5, 7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LOGPS = -1 - randn(B, T).abs()
MASK = (torch.arange(T) < torch.tensor([7, 4, 1, 6, 5])[:, None]).long()
MASK[0, 3] = 0  # a token of a tool's result
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, 0.0, -2.1])
OLD = LOGPS + 0.4 * randn(B, T, seed=1)
REF = LOGPS + 0.3 * randn(B, T, seed=2)
IS_RATIO = (0.3 * randn(B, T, seed=3)).exp()
ENTROPIES = 1 + randn(B, T, seed=4).abs()

# name: (options, whether old log-probs are given)
OBJECTIVES = {
    **{name.replace("_", "-"): ({"loss_type": name}, False) for name in LOSS_TYPES},
    **{f"{name.replace('_', '-')}-off-policy": ({"loss_type": name}, True) for name in LOSS_TYPES},
    "delta": ({"loss_type": "dapo", "delta": 1.1}, True),
    "asymmetric-clip": ({"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3}, True),
    "sequence-level": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, False),
    "sequence-level-off-policy": ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, True),
    "off-policy-mask": ({"loss_type": "dapo", "off_policy_mask_threshold": 0.05}, True),
    "top-entropy": ({"loss_type": "dapo", "top_entropy_quantile": 0.4}, True),
    "entropy-bonus": ({"loss_type": "grpo", "entropy_coef": 0.1}, True),
    "kl-on-policy": ({"loss_type": "dapo", "beta": 0.2}, False),
    "kl-sequence-level": ({"loss_type": "dapo", "beta": 0.2, "importance_sampling_level": "sequence"}, False),
    "kl-bias-corrected": ({"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": True}, True),
    "kl-bias-corrected-sequence-level": (
        {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
        True,
    ),
    **{f"kl-{name}": ({"loss_type": "dapo", "beta": 0.2, "kl_estimator": name}, True) for name in KL_ESTIMATORS},
    **{
        f"reduction-{name}": ({"loss_type": "dapo", "reduction": name}, True)
        for name in ("sequence_mean", "fixed_length", "sequence_sum")
    },
}


def case(name):
    options, is_off_policy = OBJECTIVES[name]
    options = {"max_completion_length": 11, **options}
    batch = GRPOBatch(
        MASK,
        ADVANTAGES.unsqueeze(1),
        old_per_token_logps=OLD if is_off_policy else None,
        ref_per_token_logps=REF,
        importance_sampling_ratio=IS_RATIO,
    )
    return options, GRPOObjective(**options), batch


def truth(options, batch):
    """Loss and its gradients with respect to log-probabilities and entropies, in float64."""
    logps, entropies = (x.double().requires_grad_() for x in (LOGPS, ENTROPIES))
    loss, _ = grpo_loss(
        options,
        logps,
        MASK,
        ADVANTAGES,
        old=batch.old_per_token_logps,
        ref=batch.ref_per_token_logps,
        is_ratio=IS_RATIO,
        entropies=entropies,
    )
    grads = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
    return loss.detach(), grads[0], torch.zeros(B, T).double() if grads[1] is None else grads[1]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_equal_the_oracle(name):
    options, objective, batch = case(name)
    logps = LOGPS.clone().requires_grad_()
    loss = reduce_loss(objective, batch, token_terms(objective, batch, logps, ENTROPIES).loss, ENTROPIES)
    expected, gradient, _ = truth(options, batch)
    assert relative_error(loss.detach(), expected) < 2e-6
    assert relative_error(torch.autograd.grad(loss, logps)[0], gradient) < 2e-6


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_forecast_is_the_gradient_up_to_one_factor_and_zero_grad_rows_come_last(name):
    options, objective, batch = case(name)
    expected = forecast(objective, batch)
    assert (expected is not None) == objective.is_sequencewise
    if expected is None:
        return
    positions, grad_rows = grad_rows_first(MASK.bool(), expected.needs_grad)
    rows = expected.at(positions, grad_rows)
    is_tokenwise = objective.is_tokenwise(batch.old_per_token_logps is not None)
    assert (groups_of(rows) is None) == is_tokenwise
    # As in two chunks; sequences are kept whole where a token's gradient depends on its sequence
    middle = grad_rows // 2 if is_tokenwise else rows.groups.ends[1]
    halves = [slice(0, middle), slice(middle, grad_rows)]
    chunks = [rows(half, LOGPS.flatten()[positions[half]], None) for half in halves]
    _, *truths = truth(options, batch)
    for forecasts, gradient in zip(zip(*chunks, strict=True), truths, strict=True):
        gradient = gradient.flatten()[positions[:grad_rows]]
        if forecasts[0] is None:
            assert not gradient.any()
            continue
        values = torch.cat(forecasts).double()
        factor = (gradient @ values) / (values @ values)
        assert relative_error(values * factor, gradient) < 2e-6
    assert not truths[0].flatten()[positions[grad_rows:]].any()
    assert not truths[1].flatten()[positions[grad_rows:]].any()


def test_a_forecast_is_made_token_by_token_where_these_do_not_depend_on_each_other_and_nowhere_else():
    def exists(old, **options):
        return GRPOObjective(**options).is_tokenwise(has_old_logps=old)

    assert exists(True, loss_type="dapo", beta=0.1, use_bias_correction_kl=True)
    assert not exists(False, off_policy_mask_threshold=0.1)
    assert not exists(False, top_entropy_quantile=0.5)
    assert exists(False, importance_sampling_level="sequence", beta=0.1)
    assert not exists(True, importance_sampling_level="sequence")
    assert not exists(False, importance_sampling_level="sequence", beta=0.1, kl_estimator="k4")
    assert exists(False, importance_sampling_level="sequence", beta=0.0, kl_estimator="k4")
    assert exists(False, loss_type="vespo")
    assert not exists(True, loss_type="vespo")
    assert not exists(False, loss_type="unknown")


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length", "sequence_sum"])
def test_with_a_normalizer_for_the_whole_step_the_loss_does_not_depend_on_the_micro_batches(reduction):
    objective = GRPOObjective(reduction=reduction, max_completion_length=9)
    terms = randn(B, T, seed=5)
    whole = reduce_loss(objective, GRPOBatch(MASK, ADVANTAGES.unsqueeze(1)), terms, None)
    count = MASK.sum() if reduction == "token_mean" else B
    parts = [
        reduce_loss(
            objective, GRPOBatch(MASK[rows], ADVANTAGES[rows].unsqueeze(1), normalizer=count), terms[rows], None
        )
        for rows in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-6)


def test_padding_has_weight_in_padded_sequence_sum_only():
    batch = GRPOBatch(MASK, ADVANTAGES.unsqueeze(1))
    for name in ("token_mean", "sequence_mean", "fixed_length", "sequence_sum"):
        assert not token_weights(GRPOObjective(reduction=name, max_completion_length=9), batch)[MASK == 0].any()
    assert token_weights(GRPOObjective(reduction="padded_sequence_sum"), batch)[:, 0].all()


def _exact_kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k4"])
def test_kl_estimators_are_unbiased(estimator):
    log_p = (2 * randn(9, seed=7).double()).log_softmax(0)
    log_q = randn(9, seed=8).double().log_softmax(0)
    # The expectation without sampling: every token once, weighted by its probability
    objective = GRPOObjective(kl_estimator=estimator)
    value = (log_p.exp() * kl_loss(objective, log_q, log_p, torch.zeros(9).double())).sum()
    assert value.item() == pytest.approx(_exact_kl(log_p, log_q).item(), rel=1e-12)


def test_k4_has_the_gradient_of_the_divergence():
    logits = (2 * randn(9, seed=7).double()).requires_grad_()
    log_q = randn(9, seed=8).double().log_softmax(0)
    log_p = logits.log_softmax(0)
    kl = kl_loss(GRPOObjective(kl_estimator="k4"), log_q, log_p, log_p - log_p.detach())
    (gradient,) = torch.autograd.grad((log_p.detach().exp() * kl).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(_exact_kl(log_p, log_q), logits)
    assert relative_error(gradient, expected) < 1e-12


def test_k2_has_the_gradient_of_the_divergence():
    logits = (2 * randn(9, seed=7).double()).requires_grad_()
    log_q = randn(9, seed=8).double().log_softmax(0)
    log_p = logits.log_softmax(0)
    kl = kl_loss(GRPOObjective(kl_estimator="k2"), log_q, log_p, torch.zeros(9).double())
    (gradient,) = torch.autograd.grad((log_p.detach().exp() * kl).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(_exact_kl(log_p, log_q), logits)
    assert relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "Unknown loss_type 'ppo'"),
        ({"kl_estimator": "k5"}, "Unknown kl_estimator 'k5'"),
        ({"importance_sampling_level": "word"}, "Unknown importance_sampling_level 'word'"),
        ({"reduction": "mean"}, "Unknown reduction 'mean'"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "Sequence-level importance sampling"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"reduction": "fixed_length"}, "max_completion_length"),
    ],
)
def test_unknown_and_incompatible_options_raise_with_their_name(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOObjective(**options).check()


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_ratios_of_sequences_are_refused_where_a_loss_has_none(loss_type):
    message = (
        f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'. Use "
        "importance_sampling_level='token' instead."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GRPOObjective(loss_type=loss_type, importance_sampling_level="sequence").check()
    GRPOObjective(loss_type=loss_type, importance_sampling_level="token").check()


@pytest.mark.parametrize("options", [{"loss_type": "dr_grpo"}, {"reduction": "fixed_length"}])
def test_a_fixed_length_must_be_given(options):
    message = "max_completion_length must be provided for loss_type='dr_grpo' and reduction='fixed_length'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GRPOObjective(**options).check()
    GRPOObjective(**options, max_completion_length=1).check()


def test_an_unknown_option_is_told_with_those_that_there_are():
    message = "Unknown kl_estimator 'k9': expected one of " + ", ".join(map(repr, KL_ESTIMATORS)) + "."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GRPOObjective(kl_estimator="k9").check()
