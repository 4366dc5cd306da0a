"""`fuse` and `fuse_config`: which class they make, what it refuses and says. What it trains: `tests.harness`."""

import functools
import inspect
import pickle
from dataclasses import dataclass

import pytest
import torch
import trl
from trl import GRPOConfig, GRPOTrainer

from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer, fuse, fuse_config, patch
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trainers import trl_class
from trl_fused_grpo.parity.case import Batch, Case
from trl_fused_grpo.parity.run_case import run_case
from trl_fused_grpo.parity.tiny.batches import make_data
from trl_fused_grpo.parity.trainers import Settings, fused_trainer, stock_trainer
from trl_fused_grpo.training.plan import why_forwards_are_not_shared
from trl_fused_grpo.training.requests import LogpsArgs


class Plain(GRPOTrainer):
    """A user's class."""

    _tag_names = ("mine",)

    def __init__(self, *args, weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = weight


FusedPlain = fuse(Plain)


@fuse
class Decorated(GRPOTrainer):
    """Replaced by its fused subclass."""


@dataclass
class PlainConfig(GRPOConfig):
    epsilon: float = 0.4
    own: str = "mine"


def test_the_fused_class_stands_behind_the_users_and_before_trls():
    assert fuse(GRPOTrainer) is FusedGRPOTrainer
    assert fuse(FusedGRPOTrainer) is FusedGRPOTrainer
    places = [FusedPlain.__mro__.index(cls) for cls in (Plain, FusedGRPOTrainer, GRPOTrainer)]
    assert places == sorted(places)
    assert trl_class(FusedPlain) is GRPOTrainer


def test_it_is_made_once_and_what_is_fused_already_is_returned():
    class Sub(FusedPlain):
        pass

    assert fuse(Plain) is FusedPlain is fuse(FusedPlain)
    assert fuse(Sub) is Sub
    with patch():
        assert fuse(trl.GRPOTrainer) is FusedGRPOTrainer


def test_it_looks_like_the_users_class():
    assert FusedPlain.__doc__.endswith("A user's class.")
    assert FusedPlain._tag_names == ["mine", "fused-grpo"]
    assert inspect.signature(FusedPlain) == inspect.signature(Plain)
    assert "max_steps" not in vars(FusedPlain)


@pytest.mark.parametrize("cls", [FusedPlain, Decorated], ids=["called", "decorator"])
def test_it_can_be_pickled_by_its_name(cls):
    assert cls.__name__ == {FusedPlain: "FusedPlain", Decorated: "Decorated"}[cls]
    assert cls.__module__ == __name__
    assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("value", [object, trl.SFTTrainer, GRPOConfig, "GRPOTrainer", None, lambda: GRPOTrainer])
def test_anything_that_is_no_trainer_of_grpo_is_refused(value):
    with pytest.raises(TypeError, match="fuse takes"):
        fuse(value)


def test_a_trainer_in_place_of_its_class_is_refused_with_the_class(tmp_path):
    with pytest.raises(TypeError, match="pass its class, Plain"):
        fuse(make_trainer(tmp_path, Plain))


def test_an_argument_of_the_users_constructor_and_the_options_arrive(tmp_path):
    config = fuse_config(PlainConfig)
    trainer = make_trainer(tmp_path, functools.partial(FusedPlain, weight=0.5), config=config, fused_layout="padded")
    assert (trainer.weight, trainer.epsilon_low, trainer.fused_layout()) == (0.5, 0.4, "padded")
    assert (
        why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True) is None
    )  # a constructor sees no micro-batch


def test_without_the_fused_loss_it_is_the_users_class(tmp_path):
    trainer = make_trainer(tmp_path, FusedPlain, config=PlainConfig, use_liger_loss=False)
    stock = make_trainer(tmp_path, Plain, config=PlainConfig)
    for mine, theirs in zip(*(loss_and_gradients(one, make_inputs()) for one in (trainer, stock)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


class ByName(GRPOTrainer):
    def __init__(self, *args, **kwargs):
        GRPOTrainer.__init__(self, *args, **kwargs)


def test_a_constructor_that_goes_past_the_fused_one_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"ByName.__init__ .* call super\(\).__init__"):
        make_trainer(tmp_path, fuse(ByName))


class OwnLigerLoss(GRPOTrainer):
    def compute_liger_loss(self, model, inputs):
        return 2 * super().compute_liger_loss(model, inputs)


def test_an_own_liger_loss_runs_as_in_a_subclass_of_the_fused_trainer(tmp_path):
    class OfFused(FusedGRPOTrainer):
        def compute_liger_loss(self, model, inputs):
            return 2 * super().compute_liger_loss(model, inputs)

    own, of_fused, plain = (make_trainer(tmp_path, cls) for cls in (fuse(OwnLigerLoss), OfFused, FusedGRPOTrainer))
    (loss, gradients), expected, (half, _) = (loss_and_gradients(one, make_inputs()) for one in (own, of_fused, plain))
    torch.testing.assert_close((loss, gradients), expected, rtol=0, atol=0)
    torch.testing.assert_close(loss, 2 * half)
    assert own._fused.look().level == of_fused._fused.look().level
    assert own.fused_stats.rows == plain.fused_stats.rows > 0


def test_an_own_liger_loss_is_not_called_without_the_fused_loss(tmp_path):
    without = make_trainer(tmp_path, fuse(OwnLigerLoss), use_liger_loss=False)
    stock = make_trainer(tmp_path, GRPOTrainer, config=GRPOConfig)
    loss, expected = (loss_and_gradients(one, make_inputs())[0] for one in (without, stock))
    assert torch.equal(loss, expected)


class Dense(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)


def test_the_log_says_once_that_nothing_is_fused(tmp_path, caplog):
    make_trainer(tmp_path, fuse(Dense), max_steps=2).train()
    logged = [r.message for r in caplog.records if "No log-probs come from the fused" in r.message]
    assert len(logged) == 1
    assert "Dense._get_per_token_logps_and_entropies" in logged[0]


class OwnTemperature(GRPOTrainer):
    """The temperature is another one at each look."""

    @property
    def temperature(self):
        self.looks += 1
        return 1 + 0.1 * (self.looks % 3)

    @temperature.setter
    def temperature(self, value):
        self.looks = 0


class EveryAttribute(GRPOTrainer):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("cls", "reader"),
    [(OwnTemperature, "OwnTemperature.temperature"), (EveryAttribute, "EveryAttribute.__getattribute__")],
    ids=["property", "getattribute"],
)
def test_micro_batches_share_no_forward_where_an_option_is_computed_at_each_access(tmp_path, cls, reader):
    trainer = make_trainer(tmp_path, fuse(cls))
    assert (
        why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True) == f"{reader} may see micro-batches"
    )


def test_arguments_of_the_log_prob_method_arrive_by_position_and_by_name():
    names = trl_compat.LOGPS_ARGUMENTS
    by_position = LogpsArgs.of(tuple(names), {})
    by_name = LogpsArgs.of((), {name: name for name in names})
    assert by_position == by_name
    assert set(by_name.multimodal) == {*names} - {*vars(by_name)}
    assert LogpsArgs.of((1, 2, 3, 4), {"pixel_values": None}) == LogpsArgs(1, 2, 3, 4, None, False, False, {})
    with pytest.raises(ValueError):
        LogpsArgs.of((0,) * (len(names) + 1), {})


# Configurations


def test_papo_which_reads_padding_and_draws_masks_trains_as_stock(tmp_path):
    pytest.importorskip("trl.experimental.papo")
    from trl.experimental.papo import PAPOConfig, PAPOTrainer

    case = Case(
        "papo",
        "two log-prob calls in a loss",
        {"loss_type": "grpo"},
        Batch(old="far", images="patch-pixels"),
        model="llava",
    )
    settings = Settings(tmp_path, fused_class=fuse(PAPOTrainer))
    stock = stock_trainer(case, settings, PAPOTrainer, PAPOConfig)
    trainer = fused_trainer(case, settings, PAPOConfig)
    data = make_data(case, stock, seed=0)
    expected, outcome = (run_case(one, case, data, torch.float32) for one in (stock, trainer))
    assert outcome.loss == pytest.approx(expected.loss, rel=1e-5)
    difference = sum((outcome.tensors[n] - t).square().sum() for n, t in expected.tensors.items()) ** 0.5
    assert difference < 1e-5 * expected.norm
