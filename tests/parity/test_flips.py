"""In bfloat16 a bound may decide by rounding: which batches are set aside, and what is a fault all the same."""

import math
from unittest import mock

import pytest
import torch

from tests.harness.compare import DrawnComparison, compare
from tests.harness.flips import flip_verdict
from tests.harness.random_cases import name_of, random_case
from tests.harness.steps import Outcome, fused_trainer, make_data, run_steps, stock_trainer
from trl_fused_grpo.parity.trainers import Settings


BATCHES = 32


def outcomes(seed, error, flips=(), loss=1.0):
    """Gradients around one, each wrong by about `error`, and by a third in the batches that `flips` names."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(batch):
        noise = torch.randn(64, generator=generator)
        return torch.ones(64) + error * noise - (1 / 3 if batch in flips else 0.0)

    return [Outcome(loss, {"a": gradient(batch), "b": gradient(batch)}) for batch in range(BATCHES)]


@pytest.mark.parametrize(
    ("stock_flips", "fused_flips", "verdict"),
    [
        ((), (3,), "tie"),
        ((1, 2), (2, 3, 4), "tie"),
        ((), (3, 4, 5, 6, 7), None),  # stock has none: not by chance
        ((), (), None),  # no batch is far from the others, and yet a limit is exceeded
    ],
)
def test_a_few_batches_beyond_a_bound_are_a_tie(stock_flips, fused_flips, verdict):
    reference = outcomes(0, 0.0)
    stock = outcomes(1, 0.01, stock_flips)
    fused = outcomes(2, 0.01 if fused_flips else 0.015, fused_flips)
    assert flip_verdict(reference, stock, fused) == verdict


def at_the_quantile(outcomes, others):
    """In the batches that `others` names, two tokens are taken for each other, and the gradient is wrong by a tenth."""
    for batch, outcome in enumerate(outcomes):
        outcome.high_entropy = [torch.tensor([True, False, batch in others, batch not in others])]
        outcome.tensors["a"] += 0.1 * (batch in others)
    return outcomes


def at_vllms_bounds(outcomes, others):
    """In the batches that `others` names, one sequence more is masked, and the gradient is wrong by a tenth."""
    for batch, outcome in enumerate(outcomes):
        outcome.masked = [torch.tensor([[False], [batch in others]])]
        outcome.tensors["a"] += 0.1 * (batch in others)
    return outcomes


@pytest.mark.parametrize("selecting", [at_the_quantile, at_vllms_bounds])
@pytest.mark.parametrize(
    ("of_stock", "of_fused", "error", "verdict"),
    [
        (range(16), range(4, 26), 0.01, "tie"),  # nearly all batches have one: it is known which
        (range(16), range(4, 26), 0.015, None),  # the others exceed a limit
        (range(4), range(26), 0.01, None),  # more of them than by chance
        (range(16), range(13, 31), 0.01, None),  # too few others
    ],
)
def test_other_tokens_that_trl_selects_are_a_tie(selecting, of_stock, of_fused, error, verdict):
    reference = selecting(outcomes(0, 0.0), ())
    stock, fused = selecting(outcomes(1, 0.01), of_stock), selecting(outcomes(2, error), of_fused)
    assert flip_verdict(reference, stock, fused) == verdict


def test_masks_of_a_trainer_that_leaves_sequences_out_are_not_compared():
    """It does not compute their ratios."""
    reference, stock = (at_vllms_bounds(outcomes(seed, 0.01 * seed), ()) for seed in (0, 1))
    fused = outcomes(2, 0.01, flips=(3,))
    for outcome in fused:
        outcome.masked, outcome.leaves_out = [torch.tensor([[False], [True]])], {0}
    assert flip_verdict(reference, stock, fused) == "tie"


def test_tokens_that_a_trainer_asks_for_more_often_are_not_compared():
    """As with `fused_verify`: batches far from the others are told apart by their errors, as without a quantile."""
    reference, stock = (at_the_quantile(outcomes(seed, 0.01 * seed), ()) for seed in (0, 1))
    fused = at_the_quantile(outcomes(2, 0.01, flips=(3,)), ())
    for outcome in fused:
        outcome.high_entropy *= 2
    assert flip_verdict(reference, stock, fused) == "tie"


@pytest.mark.parametrize("build", [stock_trainer, fused_trainer])
def test_the_tokens_that_the_entropy_quantile_selects_are_noted(tmp_path, build):
    case, settings = random_case('random:{"top_entropy_quantile":0.37}'), Settings(tmp_path)
    trainer = build(case, settings)
    outcome = run_steps(trainer, case, make_data(case, trainer, 0), torch.float32)
    (selected,) = outcome.high_entropy
    assert selected.float().mean().item() == pytest.approx(0.37, abs=1 / len(selected))
    assert outcome.rows is None or outcome.rows > 0  # a method of the trainer was not replaced for it


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
@pytest.mark.parametrize("build", [stock_trainer, fused_trainer])
def test_what_vllms_bounds_mask_is_noted_of_each_generation(tmp_path, build, mode):
    options = {"rollout": True, "accumulation_windows": 2, "update": True, "sampling": "token"}
    bounds = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.0}
    case, settings = random_case(name_of({**options, **bounds})), Settings(tmp_path)
    trainer = build(case, settings)
    outcome = run_steps(trainer, case, make_data(case, trainer, 0), torch.float32)
    assert len(outcome.masked) == 2 * trainer.args.gradient_accumulation_steps
    assert all(mask.shape[1] == 1 or mode == "token_mask" for mask in outcome.masked)
    assert 0.0 < torch.cat([mask.flatten() for mask in outcome.masked]).float().mean() < 1.0
    assert outcome.rows is None or outcome.rows > 0


@pytest.mark.sample(2)
@pytest.mark.any_trl
@pytest.mark.parametrize(
    ("errors", "batches", "verdict"),
    [
        ([0.01] * 256, 4, "equal"),
        ([0.0115] * 4 + [0.01] * 252, 16, "equal"),
        ([0.0115] * 64 + [0.01] * 192, 256, "equal"),  # beyond a limit by chance, which shrinks
        ([0.05] + [0.01] * 255, 64, "tie"),
        ([0.0115] * 256, 256, "different"),
    ],
)
def test_a_drawn_case_beyond_a_limit_is_judged_over_more_batches(tmp_path, errors, batches, verdict):
    """Unless it is a tie."""
    generator, ran = torch.Generator().manual_seed(0), []

    def run(*_):
        batch, arm = divmod(len(ran), 3)
        error = (0.0, 0.01, errors[batch])[arm]  # of the reference, of stock, of the fused trainer
        ran.append(Outcome(1.0, {"a": torch.ones(999) + error * torch.randn(999, generator=generator)}))
        return ran[-1]

    with mock.patch.multiple(DrawnComparison, run_steps=staticmethod(run), make_data=mock.DEFAULT):
        result = compare(random_case('random:{"rows":2,"group":2}'), Settings(tmp_path, dtype=torch.bfloat16))
    assert (len(ran), result.verdict) == (3 * batches, verdict)


def test_batches_without_a_flip_must_be_within_the_limits():
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), outcomes(2, 0.015, (3,))) is None


def test_a_gradient_that_is_no_number_is_no_tie():
    fused = outcomes(2, 0.01)
    fused[3].tensors["a"] = torch.full((64,), math.nan)
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), fused) is None


def test_a_wrong_loss_is_no_tie():
    assert flip_verdict(outcomes(0, 0.0), outcomes(1, 0.01), outcomes(2, 0.01, loss=1.1)) is None


@pytest.mark.any_trl
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapter": "prefix-tuning", "stepwise": "parameter-hook-clips"}, "stock itself fails"),
        ({"adapter": "prefix-tuning", "model": "zamba2"}, "stock itself fails"),
    ],
)
def test_a_drawn_case_that_stock_cannot_train_is_skipped_in_bfloat16_too(tmp_path, options, reason):
    result = compare(random_case(name_of(options)), Settings(tmp_path, dtype=torch.bfloat16))
    assert result.verdict == "skipped"
    assert result.reason.startswith(reason)


def test_a_drawn_case_whose_gradient_is_no_number_in_stock_is_skipped_in_bfloat16_too(tmp_path):
    run_steps, runs = DrawnComparison.run_steps, []

    def run(*args):
        runs.append(run_steps(*args))
        if len(runs) == 2:  # after the reference
            runs[-1].tensors["model.norm.weight"].fill_(math.nan)
        return runs[-1]

    with mock.patch.object(DrawnComparison, "run_steps", staticmethod(run)):
        result = compare(random_case('random:{"rows":2,"group":2}'), Settings(tmp_path, dtype=torch.bfloat16))
    assert (result.verdict, len(runs)) == ("skipped", 2)
    assert "not finite" in result.reason
