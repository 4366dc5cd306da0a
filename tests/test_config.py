"""`use_liger_loss` in TRL's own GRPOConfig, and FusedGRPOConfig."""

import dataclasses
import json
import subprocess
import sys

import pytest
import trl
from transformers import HfArgumentParser
from trl import GRPOConfig

from trl_fused_grpo import FusedGRPOConfig


def options(folder, **extra):
    return {"output_dir": str(folder), "use_cpu": True, "bf16": False, **extra}


def test_the_field_is_a_real_dataclass_field_that_is_off_by_default(tmp_path):
    (field,) = [f for f in dataclasses.fields(trl.GRPOConfig) if f.name == "use_liger_loss"]
    assert field.type is bool and field.default is False
    assert GRPOConfig(**options(tmp_path)).use_liger_loss is False


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


def test_delta_and_the_fused_loss_go_together_and_leave_layer_kernels_off(tmp_path):
    args = trl.GRPOConfig(**options(tmp_path, use_liger_loss=True, delta=1.5))
    assert (args.use_liger_loss, args.use_liger_kernel, args.delta) == (True, False, 1.5)


def test_the_flag_gives_no_deprecation_warning(tmp_path, recwarn):
    trl.GRPOConfig(**options(tmp_path, use_liger_loss=True))
    assert not [w for w in recwarn if "use_liger_loss" in str(w.message)]


def test_fused_config_is_on_by_default_with_its_further_options(tmp_path):
    args = FusedGRPOConfig(**options(tmp_path))
    assert (args.use_liger_loss, args.fused_way, args.fused_logits_mib) == (True, "auto", None)


IMPORTED_BEFORE = """
from dataclasses import dataclass
from trl import GRPOConfig
from trl.trainer.grpo_config import GRPOConfig as Deep

@dataclass
class Mine(GRPOConfig):
    extra: int = 3

import trl_fused_grpo
import trl
assert trl.GRPOConfig is GRPOConfig is Deep
for config in (GRPOConfig, Mine):
    assert config(output_dir=OUT, use_cpu=True, bf16=False, use_liger_loss=True).use_liger_loss is True
assert Mine(output_dir=OUT, use_cpu=True, bf16=False, extra=4).extra == 4
"""


def test_it_does_not_matter_that_the_config_was_imported_or_subclassed_first(tmp_path):
    subprocess.run([sys.executable, "-c", f"OUT = {str(tmp_path)!r}\n{IMPORTED_BEFORE}"], check=True)
