"""`use_liger_loss` in TRL's own GRPOConfig, FusedGRPOConfig, and the options that a trainer reads of either."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import trl
from transformers import HfArgumentParser
from trl import GRPOConfig

from trl_fused_grpo import FusedGRPOConfig
from trl_fused_grpo.config import FusedOptions


def options(folder, **extra):
    return {"output_dir": str(folder), "use_cpu": True, "bf16": False, **extra}


def test_the_field_is_a_real_dataclass_field_that_says_nothing_by_default(tmp_path):
    (field,) = [f for f in dataclasses.fields(trl.GRPOConfig) if f.name == "use_liger_loss"]
    assert field.type is bool and field.default is None
    assert GRPOConfig(**options(tmp_path)).use_liger_loss is None


def test_the_field_is_saved_with_the_arguments(tmp_path):
    args = trl.GRPOConfig(**options(tmp_path, use_liger_loss=True))
    assert args.to_dict()["use_liger_loss"] is True
    assert json.loads(args.to_json_string())["use_liger_loss"] is True
    assert "use_liger_loss=True" in repr(args)


@pytest.mark.parametrize("parser", [HfArgumentParser, trl.TrlParser], ids=["HfArgumentParser", "TrlParser"])
@pytest.mark.parametrize("config", [GRPOConfig, FusedGRPOConfig])
def test_argument_parsers_see_the_field_and_keep_the_other_defaults(tmp_path, parser, config):
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--use_liger_loss", "True"]
    (args,) = parser(config).parse_args_into_dataclasses(line)
    assert args.use_liger_loss is True
    assert args.learning_rate == GRPOConfig(**options(tmp_path)).learning_rate


@pytest.mark.parametrize("parser", [HfArgumentParser, trl.TrlParser], ids=["HfArgumentParser", "TrlParser"])
@pytest.mark.parametrize(
    ("words", "said"),
    [([], None), (["--use_liger_loss"], True), (["--use-liger-loss"], True), (["--use_liger_loss", "false"], False)],
    ids=["nothing", "flag", "hyphens", "false"],
)
def test_argument_parsers_tell_not_said_from_said_to_be_off(tmp_path, parser, words, said):
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", *words]
    (args,) = parser(GRPOConfig).parse_args_into_dataclasses(line)
    assert args.use_liger_loss is said


@pytest.mark.parametrize("config", [GRPOConfig, FusedGRPOConfig])
@pytest.mark.parametrize("value", ["false", 1])
def test_the_flag_is_true_false_or_none(tmp_path, config, value):
    with pytest.raises(ValueError, match=f"use_liger_loss must be None, True or False, not {value!r}."):
        config(str(tmp_path), use_cpu=True, bf16=False, use_liger_loss=value)


@pytest.mark.parametrize("said", [None, True, False])
def test_what_was_said_outlives_yaml_and_pickling(tmp_path, said):
    file = tmp_path / "grpo.yaml"
    lines = [f"output_dir: {tmp_path}", "use_cpu: true", "bf16: false"]
    file.write_text("\n".join(lines if said is None else [*lines, f"use_liger_loss: {str(said).lower()}"]))
    (args,) = trl.TrlParser(GRPOConfig).parse_args_and_config(["--config", str(file)])
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    copied = GRPOConfig(**options(tmp_path, use_liger_loss=loaded.to_dict()["use_liger_loss"]))
    assert args.use_liger_loss is loaded.use_liger_loss is copied.use_liger_loss is said


def test_delta_and_the_fused_loss_go_together_and_leave_layer_kernels_off(tmp_path):
    args = trl.GRPOConfig(**options(tmp_path, use_liger_loss=True, delta=1.5))
    assert (args.use_liger_loss, args.use_liger_kernel, args.delta) == (True, False, 1.5)


def test_the_flag_gives_no_deprecation_warning(tmp_path, recwarn):
    trl.GRPOConfig(**options(tmp_path, use_liger_loss=True))
    assert not [w for w in recwarn if "use_liger_loss" in str(w.message)]


def test_fused_config_is_on_by_default_with_its_further_options(tmp_path):
    args = FusedGRPOConfig(**options(tmp_path))
    assert (args.use_liger_loss, args.fused_backward, args.fused_logits_mib) == (True, None, None)


def test_a_config_without_the_options_has_their_defaults(tmp_path):
    assert FusedOptions.from_args(GRPOConfig(**options(tmp_path))) == FusedOptions()
    assert FusedOptions.from_args(FusedGRPOConfig(**options(tmp_path))) == FusedOptions()


def test_defaults_hold_for_options_that_the_arguments_do_not_have(tmp_path):
    defaults = FusedOptions(fused_layout="packed", kl_estimator="k1")
    assert FusedOptions.from_args(GRPOConfig(**options(tmp_path)), defaults) == defaults
    args = FusedGRPOConfig(**options(tmp_path, fused_compile=True))
    assert FusedOptions.from_args(args, defaults) == FusedOptions(fused_compile=True)


def test_options_are_read_from_the_arguments(tmp_path):
    args = FusedGRPOConfig(**options(tmp_path, fused_layout="packed", fused_max_tokens_per_forward=0))
    read = FusedOptions.from_args(args)
    assert read == FusedOptions(fused_layout="packed", fused_max_tokens_per_forward=0)
    assert read.forces_rows and not FusedOptions().forces_rows


IMPORTED_BEFORE = """
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import ClassVar

import trl
from trl import GRPOConfig
from trl.trainer.grpo_config import GRPOConfig as Deep


@dataclass
class Mine(GRPOConfig):
    extra: int = 3
    names: list = field(default_factory=lambda: ["a"])
    VALID: ClassVar[tuple] = (3, 4)

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.extra


@dataclass
class Grandchild(Mine):
    more: int = 5


class Plain(GRPOConfig):
    note: str = "a plain class's annotation is no field"


@dataclass
class BelowPlain(Plain):
    below: int = 7


class PlainBelow(Grandchild):
    def __init__(self, *args, **kwargs):
        self.told = True
        super().__init__(*args, **kwargs)


@dataclass
class Mixin:
    mixed: int = 8


@dataclass
class Both(Mixin, Grandchild):
    pass


@dataclass
class Diamond(Both, BelowPlain):
    deep: int = 9


@dataclass(order=True, unsafe_hash=True, repr=False)
class Particular(Mine):
    _: KW_ONLY
    named: int = 10


@dataclass
class Decided(Mine):
    use_liger_loss: bool = field(default=True, metadata={"help": "mine"})


CLASSES = [GRPOConfig, Mine, Grandchild, Plain, BelowPlain, PlainBelow, Both, Diamond, Particular, Decided]
before = {cls: [f.name for f in fields(cls) if f.name != "use_liger_loss"] for cls in CLASSES}
parts = {cls: (cls.__post_init__, cls.__repr__ is object.__repr__) for cls in CLASSES[1:]}

import trl_fused_grpo

OPTIONS = {"output_dir": OUT, "use_cpu": True, "bf16": False}
assert trl.GRPOConfig is GRPOConfig is Deep
for cls in CLASSES:
    assert cls(**OPTIONS, use_liger_loss=True).use_liger_loss is True, cls
    assert cls(**OPTIONS).use_liger_loss is (True if cls is Decided else None), cls
    names = [f.name for f in fields(cls)]
    assert [n for n in names if n != "use_liger_loss"] == before[cls], cls
    assert names.count("use_liger_loss") == 1, cls
    assert cls(**OPTIONS, use_liger_loss=True).to_dict()["use_liger_loss"] is True
    if cls is not Particular:
        assert "use_liger_loss=True" in repr(cls(**OPTIONS, use_liger_loss=True)), cls
    assert cls(**OPTIONS, use_liger_loss=True) != cls(**OPTIONS, use_liger_loss=False), cls

mine = Mine(**OPTIONS, extra=4)
assert (mine.extra, mine.doubled, mine.names, Mine.VALID) == (4, 8, ["a"], (3, 4))
assert Plain.note == Plain(**OPTIONS).note and "note" not in Plain.__dataclass_fields__
grandchild = Grandchild(**OPTIONS, extra=5, more=6)
assert (grandchild.doubled, grandchild.more) == (10, 6)
assert BelowPlain(**OPTIONS, below=1).below == 1
assert PlainBelow(**OPTIONS, more=2).told is True
both = Both(**OPTIONS, mixed=1, more=2, use_liger_loss=True)
assert (both.mixed, both.more, both.doubled) == (1, 2, 6)
deep = Diamond(**OPTIONS, mixed=1, below=2, deep=3, use_liger_loss=True)
assert (deep.mixed, deep.below, deep.deep, deep.doubled) == (1, 2, 3, 6)
particular = Particular(**OPTIONS, named=11)
assert particular.named == 11
assert Particular.__hash__ is not None and "__lt__" in vars(Particular) and "__repr__" not in vars(Particular)
assert Decided.__dataclass_fields__["use_liger_loss"].metadata["help"] == "mine"
"""


def test_it_does_not_matter_that_the_config_was_imported_or_subclassed_first(tmp_path):
    code = f"OUT = {str(tmp_path)!r}\n{IMPORTED_BEFORE}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
