"""`fuse_config`: which configuration it makes, what it keeps of the user's, and what it refuses."""

import copy
import pickle
from dataclasses import dataclass, fields

import pytest
import torch
import trl
from transformers import HfArgumentParser
from trl import GRPOConfig

from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOConfig, fuse_config

from .test_fuse import FusedPlain, PlainConfig


def test_a_fused_configuration_keeps_the_defaults_of_its_class(tmp_path):
    config = fuse_config(PlainConfig)
    assert fuse_config(GRPOConfig) is FusedGRPOConfig is fuse_config(FusedGRPOConfig)
    assert config is fuse_config(PlainConfig) is fuse_config(config)
    args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    stock = PlainConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    changed = {f.name for f in fields(stock) if getattr(args, f.name) != getattr(stock, f.name)}
    assert changed - {"logging_dir"} == {"use_liger_loss"}
    assert {f.name for f in fields(args)} - {f.name for f in fields(stock)} == (
        {f.name for f in fields(FusedGRPOConfig)} - {f.name for f in fields(GRPOConfig)}
    )
    with pytest.raises(ValueError, match="fused_layout must be"):
        config(output_dir=str(tmp_path), use_cpu=True, bf16=False, fused_layout="wide")


def test_a_fused_configuration_is_copied_pickled_saved_and_parsed(tmp_path):
    config = fuse_config(PlainConfig)
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    args = config(**options, fused_layout="packed", own="yours")
    torch.save(args, tmp_path / "training_args.bin")
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    for other in (copy.deepcopy(args), pickle.loads(pickle.dumps(args)), saved):
        assert type(other) is config
        assert other == args
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    (parsed,) = HfArgumentParser(config).parse_args_into_dataclasses([*line, "--fused_layout", "padded"])
    assert (parsed.fused_layout, parsed.epsilon, parsed.use_liger_loss) == ("padded", 0.4, True)

    class Sub(config):
        pass

    assert type(copy.deepcopy(Sub(**options))) is Sub


@dataclass(slots=True)
class Slots(GRPOConfig):
    own: str = "mine"


@dataclass
class OwnState(GRPOConfig):
    own: str = "mine"

    def __getstate__(self):
        return {**vars(self), "own": "saved"}

    def __setstate__(self, state):
        vars(self).update(state, own=f"{state['own']} and loaded")


@pytest.mark.parametrize(("cls", "own"), [(Slots, "yours"), (OwnState, "saved and loaded")])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_a_copy_of_a_fused_configuration_has_what_one_of_its_class_has(tmp_path, cls, own, copied):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "own": "yours"}
    args = fuse_config(cls)(**options, fused_layout="packed")
    other = copied(args)
    assert other.own == own == copied(cls(**options)).own
    args.own = other.own
    assert type(other) is type(args) and other == args


@dataclass
class OwnMethods(GRPOConfig):
    def __repr__(self):
        return "mine"

    def __eq__(self, other):
        return other == "mine"

    def __hash__(self):
        return 7


def test_a_fused_configuration_keeps_methods_that_dataclass_would_replace(tmp_path):
    args = fuse_config(OwnMethods)(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert (repr(args), args == "mine", hash(args)) == ("mine", True, 7)


@dataclass
class OwnEstimator(GRPOConfig):
    kl_estimator: str = "of a paper"


class OwnConstructor(GRPOConfig):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (OwnEstimator, "OwnEstimator has a kl_estimator of its own.* rename it"),
        (OwnConstructor, "OwnConstructor has a constructor of its own"),
        (trl.SFTConfig, "takes GRPOConfig, RLOOConfig, AsyncGRPOConfig or a subclass"),
        (PlainConfig.__name__, "takes GRPOConfig, RLOOConfig, AsyncGRPOConfig or a subclass"),
    ],
)
def test_a_configuration_that_cannot_take_the_options_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        fuse_config(value)


def test_a_field_of_the_users_with_the_name_of_an_option_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, FusedPlain, config=OwnEstimator, use_liger_loss=True, beta=0.1)
    assert trainer._fused.engine.options.kl_estimator == "k3"
    assert trainer.args.kl_estimator == "of a paper"
