"""Which options are drawn at random, and how those are judged that a seed draws last."""

from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOConfig

from tests.harness import compare, random_cases
from tests.harness.drawing import NOT_DRAWN
from tests.harness.judge import with_metrics_of_others
from tests.harness.random_cases import draw, name_of, random_case
from tests.harness.steps import Outcome
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.loss.objective import KL_ESTIMATORS
from trl_fused_grpo.options import BACKWARD_MODES, LAYOUTS
from trl_fused_grpo.parity.case import Rollout


DRAWS = 5_000
PAGE = " ".join((Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8").split())
LAST = {
    *("fused_verify", "fused_skip_zero_grad_sequences", "equal_completions", "kl_estimator"),
}


@pytest.fixture(scope="module")
def drawn():
    return [draw(4, index) for index in range(DRAWS)]


def result_of(settings, **options):
    return compare(random_case(name_of({"seed": 5, **options})), settings)


@pytest.mark.any_trl
def test_every_option_of_ours_is_drawn_or_listed_with_a_reason(drawn):
    own = {option.name for option in fields(FusedGRPOConfig)} - {option.name for option in fields(GRPOConfig)}
    own |= {option.name for option in fields(FusedOptions)} | {"use_liger_loss"}
    found = {name for options in drawn for name in options}
    assert own - found == set(NOT_DRAWN)
    assert all(f"`{name}`" in PAGE for name in NOT_DRAWN)


@pytest.mark.any_trl
@pytest.mark.parametrize("option", [o for o in fields(FusedOptions) if o.name not in NOT_DRAWN], ids=lambda o: o.name)
def test_every_choice_of_an_option_is_drawn(drawn, option):
    choices = {"fused_layout": LAYOUTS, "fused_backward": BACKWARD_MODES, "kl_estimator": KL_ESTIMATORS}
    known = choices.get(option.name, (False, True) if isinstance(option.default, bool) else ())
    found = {options[option.name] for options in drawn if option.name in options}
    assert {*known} - {option.default} <= found
    assert found - {option.default}  # some value that the default is not


@pytest.mark.any_trl
def test_an_estimator_that_stock_lacks_is_drawn_without_a_kl_term_only(drawn):
    assert {options["kl_estimator"] for options in drawn if "kl_estimator" in options and options.get("beta")} == {"k3"}
    assert "`k1`, `k2` and `k4` where `beta` is zero" in PAGE


@pytest.mark.any_trl
def test_what_is_drawn_last_leaves_all_else_as_it_was(drawn, monkeypatch):
    """So that recorded seeds mean what they meant."""
    monkeypatch.setattr(random_cases, "draw_last_options", lambda drawing: None)
    for index, options in enumerate(drawn[:300]):
        assert draw(4, index) == {name: value for name, value in options.items() if name not in LAST}


@pytest.mark.any_trl
def test_the_last_options_go_where_they_belong():
    case = random_case('random:{"rollout":true,"kl_estimator":"k3","fused_verify":1,"equal_completions":true}')
    assert dict(case.fused) == {"kl_estimator": "k3", "fused_verify": 1}
    assert "kl_estimator" not in case.config
    assert isinstance(case.data, Rollout)
    assert case.data.equal_completions


VERIFIED = {"rollout": True, "gradient_accumulation_steps": 2, "fused_verify": 1}


def test_a_comparison_that_changes_the_last_bits_is_different(settings, monkeypatch):
    class Wrong(FusedGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * (1 + 2e-7 * getattr(self.args, "fused_verify", 0))

    assert result_of(settings, **VERIFIED).verdict == "equal"
    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", Wrong)
    result = result_of(settings, **VERIFIED)
    assert result.verdict == "different"
    assert result.reason.startswith("fused_verify changes ")


def test_a_false_warning_of_a_comparison_is_different(settings, monkeypatch):
    class Warns(FusedGRPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            trl_compat.metrics_of(self)["fused/verify_logps"].append(0.04)
            return loss

    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", Warns)
    result = result_of(settings, **VERIFIED)
    assert (result.verdict, result.reason) == ("different", "fused_verify warns of 4.0e-02")


LEFT_OUT = {"rollout": True, "gradient_accumulation_steps": 2, "fused_skip_zero_grad_sequences": True}


@pytest.mark.parametrize(
    ("leaves_out", "verdict"), [(True, "equal"), pytest.param(False, "different", marks=pytest.mark.nightly)]
)
def test_the_entropy_is_excused_where_sequences_were_left_out_and_nowhere_else(
    settings, monkeypatch, leaves_out, verdict
):
    class Wrong(FusedGRPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            trl_compat.metrics_of(self)["entropy"][-1] *= 1.01
            return loss

    monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", Wrong)
    monkeypatch.setattr("tests.harness.rounding.MOVES", 2)
    result = result_of(settings, **LEFT_OUT, equal_completions=leaves_out)
    assert result.verdict == verdict
    assert result.reason == ("" if leaves_out else "metrics differ: entropy")


@pytest.mark.parametrize(("fused", "of_sampling"), [({}, 5.0), ({"fused_skip_old_logps": False}, 3.0)])
def test_no_other_metric_and_no_other_window_is_excused(fused, of_sampling):
    case = random_case(name_of({"rollout": True, "accumulation_windows": 3, **fused}))
    names = ("entropy", "sampling/importance_sampling_ratio/mean", "kl")
    stock = Outcome(metrics={name: [1.0, 2.0, 3.0] for name in names})
    ours = Outcome(metrics={name: [float("nan"), 4.0, 5.0] for name in names}, leaves_out={0, 2})
    entropy, sampling, kl = with_metrics_of_others(case, stock, ours).metrics.values()
    assert entropy == [1.0, 2.0, 5.0]  # what is no number stays different
    assert sampling == [1.0, 2.0, of_sampling]
    assert kl == [1.0, 2.0, 3.0]
