"""What is counted over all processes and over an accumulation window, in one process beside a pretended other one."""

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss import reduction
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics
from trl_fused_grpo.training.forward import AccumulationWindow
from trl_fused_grpo.training.requests import build_loss_request


def test_recomputed_rows_are_counted_over_all_processes():
    """This one recomputed 1 of 4 rows, then none of 6; the other one 3 of 12, then 3 of 4."""
    other = torch.tensor([[3.0, 12.0], [3.0, 4.0]])
    accelerator = SimpleNamespace(
        num_processes=2, device=torch.device("cpu"), reduce=lambda mine, reduction: {"sum": mine + other}[reduction]
    )
    trainer = SimpleNamespace(accelerator=accelerator, _metrics={"train": {"fused/rows_recomputed": []}})
    state = SimpleNamespace(trainer=trainer, _recomputed=[(1, 4), (0, 6)])
    AccumulationWindow.log_recomputed(state)
    assert trainer._metrics["train"]["fused/rows_recomputed"] == pytest.approx([4 / 16, 3 / 10])
    assert state._recomputed == []


def test_metrics_of_the_sampler_are_those_of_all_processes():
    """Each process adds its own sequences; the values are those of both together."""
    correction = SamplingCorrection("token_truncate", None, 2.0, nan_ratio_is_one=True)
    mask = torch.ones(1, 2)
    sampled = {0: torch.tensor([[-1.0, -2.0]]), 1: torch.tensor([[-4.0, -1.0]])}
    logps = torch.tensor([[-1.5, -1.8]])
    metrics = {}
    for process, sampling in sampled.items():
        metrics[process] = SamplingMetrics()
        ratio = correction.ratio(logps, sampling, mask)
        metrics[process].add(0, logps, sampling, mask, ratio)
    others = []
    metrics[1].gathered(SimpleNamespace(gather=lambda mine: others.append(mine) or mine), correction)
    values = metrics[0].gathered(SimpleNamespace(gather=lambda mine: torch.cat([mine, *others])), correction)
    differences = [(logps - sampling).abs() for sampling in sampled.values()]
    ratios = [correction.ratio(logps, sampling, mask) for sampling in sampled.values()]
    expected = [
        *(torch.stack([d.mean() for d in differences]).mean(), torch.cat(differences).max()),
        *(torch.cat(ratios).min(), torch.stack([r.mean() for r in ratios]).mean(), torch.cat(ratios).max()),
    ]
    assert values == pytest.approx(dict(zip(SAMPLING_METRICS, map(float, expected), strict=True)))


@pytest.mark.parametrize(("given", "expected"), [(None, (5 + 9) / 2), (30.0, 15.0)], ids=["counted", "given"])
def test_tokens_of_a_step_are_those_of_all_processes_over_their_number(given, expected, monkeypatch):
    for name, value in (("is_available", True), ("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(reduction.dist, name, lambda value=value: value)
    monkeypatch.setattr(reduction.dist, "all_reduce", lambda tokens: tokens.add_(9))
    mask = torch.ones(1, 5)
    assert reduction.tokens_per_process(mask, given).item() == expected


@pytest.mark.parametrize(("accumulation", "generation"), [(2, 2), (2, 4), (4, 2)])
def test_the_forecast_has_the_normalizer_of_trl(tmp_path, accumulation, generation):
    """
    TRL 1.9 rescales the tokens of a generation batch to those of an accumulation window, older releases do not. Without
    its common unit a forecast is the gradient of TRL's own loss.
    """
    options = {"loss_type": "dapo", "gradient_accumulation_steps": accumulation, "steps_per_generation": generation}
    trainers = [make_trainer(tmp_path / cls.__name__, cls, **options) for cls in (GRPOTrainer, FusedGRPOTrainer)]
    inputs = {**make_inputs(), "num_items_in_batch": torch.tensor(77)}
    leaf = torch.full(inputs["completion_ids"].shape, -2.0, requires_grad=True)
    for trainer in trainers:
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = accumulation
    stock, fused = trainers
    stock._get_per_token_logps_and_entropies = lambda *args, **kwargs: trl_compat.logps_result(
        leaf, torch.ones_like(leaf), None
    )
    (gradient,) = torch.autograd.grad(GRPOTrainer._compute_loss(stock, stock.model, dict(inputs)), leaf)
    forecast = build_loss_request(fused, dict(inputs), skip_zero_grad=False).forecast
    assert relative_error(forecast.on_policy / forecast.unit, gradient) < 1e-6
