"""
Sequences that receive no gradient are left out (`fused_skip_zero_grad_sequences`): the gradients stay, and of the
metrics those alone change that need log-probs which are not known. They cover the other sequences.
"""

import math

import pytest
import torch

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS
from trl_fused_grpo.training.requests import DEFERRED


def with_zero_advantages(**extra):
    """A micro-batch in which every other sequence has no advantage."""
    inputs = make_inputs(rows=8, **extra)
    inputs["advantages"][::2] = 0.0
    return inputs


def others_of(inputs):
    """The sequences that have one."""
    return {name: value[1::2] if value.dim() else value for name, value in inputs.items()}


def some_logps(inputs, spread):
    """Log-probs about those of the tiny model."""
    noise = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(0))
    return spread * noise - 6.9


def metrics_with_and_without(tmp_path, inputs, **options):
    """Metrics with all sequences and with those that receive no gradient left out; the trainer of the latter."""
    metrics = []
    for skips in (False, True):
        trainer = make_trainer(tmp_path, fused_skip_zero_grad_sequences=skips, **options)
        trainer.use_vllm = "sampling_per_token_logps" in inputs
        loss_and_gradients(trainer, inputs)
        metrics.append(trl_compat.metrics_of(trainer))
    return *metrics, trainer


def test_zero_grad_sequences_can_be_left_out(tmp_path):
    inputs = with_zero_advantages()
    with_all = make_trainer(tmp_path)
    _, expected = loss_and_gradients(with_all, inputs)
    skipping = make_trainer(tmp_path, fused_skip_zero_grad_sequences=True)
    _, gradients = loss_and_gradients(skipping, inputs)
    assert all(relative_error(gradients[name], expected[name]) < 1e-5 for name in expected)
    assert skipping.fused_stats.rows == inputs["completion_mask"][1::2].sum()
    assert skipping.fused_stats.leaves_out
    assert not with_all.fused_stats.leaves_out

    alone = make_trainer(tmp_path)
    loss_and_gradients(alone, others_of(inputs))
    assert skipping._metrics["train"]["entropy"] == pytest.approx(alone._metrics["train"]["entropy"], rel=1e-5)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_zero_grad_sequences_can_be_left_out_where_the_ratio_comes_from_the_training_forward(tmp_path, mode):
    inputs = with_zero_advantages()
    inputs |= {"sampling_per_token_logps": some_logps(inputs, 0.2), DEFERRED: torch.tensor(True)}
    results = []
    for given, skips in ((inputs, False), (inputs, True), (others_of(inputs), False)):
        options = {"vllm_importance_sampling_mode": mode, "fused_skip_zero_grad_sequences": skips}
        trainer = make_trainer(tmp_path, **options)
        trainer.use_vllm = True
        _, gradients = loss_and_gradients(trainer, given)
        assert trainer.fused_stats.recomputed == 0
        assert trainer.fused_stats.rows == given["completion_mask"][skips :: 2 if skips else 1].sum()
        results.append((gradients, trainer._metrics["train"]))
    (expected, with_all), (gradients, metrics), (_, of_others) = results
    assert all(relative_error(gradients[name], expected[name]) < 1e-5 for name in expected)
    for name in SAMPLING_METRICS:
        assert metrics[name] == pytest.approx(of_others[name], rel=1e-5)
    assert metrics[SAMPLING_METRICS[0]] != pytest.approx(with_all[SAMPLING_METRICS[0]], rel=1e-3)


def test_where_none_would_be_left_the_first_one_is(tmp_path):
    """Else the entropy would be no number, on every process where one has such a micro-batch."""
    inputs = make_inputs(rows=4, advantages=torch.zeros(4))
    inputs["completion_mask"][0] = 0
    skipping = make_trainer(tmp_path, fused_skip_zero_grad_sequences=True)
    loss, gradients = loss_and_gradients(skipping, inputs)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())
    assert skipping.fused_stats.rows == inputs["completion_mask"][1].sum()

    alone = make_trainer(tmp_path)
    loss_and_gradients(alone, {name: value[1:2] if value.dim() else value for name, value in inputs.items()})
    (entropy,) = skipping._metrics["train"]["entropy"]
    assert math.isfinite(entropy)
    assert [entropy] == pytest.approx(alone._metrics["train"]["entropy"], rel=1e-5)


def test_what_is_clipped_is_counted_where_vllms_ratio_leaves_no_gradient(tmp_path):
    inputs = make_inputs(rows=8)
    inputs["advantages"] = -inputs["advantages"].abs()
    inputs["advantages"][1::4] = 0.0
    ratio = torch.ones(inputs["completion_ids"].shape)
    ratio[::2] = 0.0
    logps = some_logps(inputs, 2.0)
    inputs |= {"old_per_token_logps": logps, "sampling_per_token_logps": logps, "importance_sampling_ratio": ratio}
    with_all, metrics, trainer = metrics_with_and_without(
        tmp_path, inputs, loss_type="dapo", vllm_importance_sampling_mode="token_mask"
    )
    assert trainer.fused_stats.leaves_out
    assert with_all["clip_ratio/low_mean"][0] > 0.1
    assert {name for name in with_all if metrics[name] != pytest.approx(with_all[name], rel=1e-5)} == {"entropy"}


@pytest.mark.skipif(trl_compat.TRL.release < (1, 0), reason="this TRL has no VESPO")
@pytest.mark.parametrize("is_deferred", [False, True], ids=["old log-probs", "deferred ratio"])
def test_vespo_with_old_log_probs_leaves_none_out(tmp_path, is_deferred):
    """It logs a weight of every sequence."""
    inputs = with_zero_advantages()
    logps = some_logps(inputs, 0.3)
    extra = {"sampling_per_token_logps": logps, DEFERRED: torch.tensor(True)}
    inputs |= extra if is_deferred else {"old_per_token_logps": logps}
    with_all, metrics, trainer = metrics_with_and_without(
        tmp_path, inputs, loss_type="vespo", vllm_importance_sampling_mode="token_truncate"
    )
    assert not trainer.fused_stats.leaves_out
    assert metrics == with_all
