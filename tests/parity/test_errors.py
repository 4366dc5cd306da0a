"""How parity measures: what counts as a difference of gradients, metrics, logs and updates."""

import math

import pytest
import torch

from tests.harness.run_training import Run
from tests.harness.training_errors import differing_entries, first_difference, update_errors
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.parity import judge
from trl_fused_grpo.parity.cases import CASES
from trl_fused_grpo.parity.compare import Comparison
from trl_fused_grpo.parity.judge import differing_metrics, measure
from trl_fused_grpo.parity.run_case import Outcome
from trl_fused_grpo.parity.trainers import Settings


def test_nothing_is_equal_to_an_exact_zero_but_zero():
    zero, noise = Outcome(tensors={"w": torch.zeros(3)}), Outcome(tensors={"w": torch.full((3,), 1e-30)})
    assert measure([zero], [zero]).parameters["w"] == 0.0
    assert math.isinf(measure([zero], [noise]).parameters["w"])


def test_a_nan_gradient_is_the_worst():
    right = Outcome(loss=1.0, tensors={"a": torch.ones(2), "b": torch.ones(2)})
    wrong = Outcome(loss=1.0, tensors={"a": torch.full((2,), math.nan), "b": torch.zeros(2)})
    assert measure([right], [wrong]).worst_parameter == "a"


def test_metrics_differ_by_name_count_and_value():
    stock = {"same": [1.0, math.nan], "value": [1.0], "count": [1.0], "stock": [0.0]}
    fused = {"same": [1.00001, math.nan], "value": [1.01], "count": [1.0, 1.0], "fused": [0.0]}
    assert differing_metrics(stock, fused) == ["count", "fused (extra)", "stock (missing)", "value"]
    assert differing_metrics(stock, fused, values=False) == ["count", "fused (extra)", "stock (missing)"]


def test_log_entries_differ_by_name_value_and_number():
    stock = [{"loss": 1.0, "kl": None}, {"train_loss": 2.0, "epoch": 1}]
    fused = [{"loss": 1.001, "entropy": 1.0}, {"train_loss": 2.00001, "epoch": 1}]
    assert differing_entries(stock, fused) == ["entropy (extra)", "kl (missing)", "loss"]
    assert differing_entries(stock, stock) == []
    assert differing_entries(stock, stock[:1]) == ["entries"]


def test_what_was_seen_differs_by_value_kind_and_number():
    assert first_difference([1.0, "none"], [1.0 + 1e-7, "none"]) is None
    assert first_difference([1.0, 2.0], [1.0, 2.1]) == "saw 2.1 for 2.0 (number 1 of 2)"
    assert first_difference([1.0], ["none"]) == "saw none for 1.0 (number 0 of 1)"
    assert first_difference([1.0], []) == "saw 0 things for 1"


def test_an_update_where_stock_makes_none_is_an_infinite_error():
    zero, fused = (Run({"w": torch.full((3,), value)}, {"w": 1e-3}) for value in (0.0, 1e-9))
    assert math.isinf(update_errors(zero, fused).parameters["w"])


def test_the_rounding_of_weights_is_no_error():
    stock = Run({"w": torch.ones(4)}, {"w": 1e-6})
    off_by_less, off_by_more = (Run({"w": torch.ones(4) + error}) for error in (2e-7, 2e-5))
    assert update_errors(stock, off_by_less).parameters["w"] == 0.0
    assert update_errors(stock, off_by_more).parameters["w"] == pytest.approx(2e-5, rel=0.1)


class WithAnotherLoss(FusedGRPOTrainer):
    """Off by ten times the tolerance."""

    def training_step(self, *args, **kwargs):
        """Train as the fused trainer, and report a larger loss."""
        return super().training_step(*args, **kwargs) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("name", "fused", "verdict"),
    [
        ("is-sequence-lora", FusedGRPOTrainer, "equal"),
        ("is-sequence-lora", WithAnotherLoss, "different"),
        ("dapo", FusedGRPOTrainer, "different"),
    ],
)
def test_float64_decides_where_float32_rounds_and_weights_are_of_sequences(tmp_path, monkeypatch, name, fused, verdict):
    monkeypatch.setattr(judge, "TOLERANCE", 1e-12)  # what rounds by chance exceeds it
    monkeypatch.setattr(Comparison, "rounds_of", staticmethod(lambda case: [6]))
    case = next(case for case in CASES if case.name == name)
    result = Comparison(case, Settings(tmp_path, fused_class=fused)).run()
    assert result.verdict == verdict, result.reason
    assert ("float64" in result.reason) == (fused is WithAnotherLoss)
