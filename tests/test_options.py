"""The options: what each may be, in Python as in YAML and on command lines, and what is not heeded."""

import re

import pytest
import trl
from trl import GRPOConfig

from trl_fused_grpo import FusedGRPOConfig, FusedRLOOConfig, patch
from trl_fused_grpo.loss import objective
from trl_fused_grpo.options import BASIC_OPTIONS, KL_ESTIMATORS, FusedOptions, allowed_values


def made(folder, config=FusedGRPOConfig, **options):
    return config(output_dir=str(folder), use_cpu=True, bf16=False, **options)


WRONG = [
    ("fused_memory", "80%", "None or a fraction above 0 and at most 1, not '80%'"),
    ("fused_memory", 2, "None or a fraction above 0 and at most 1, not 2"),
    ("fused_memory", True, "None or a fraction above 0 and at most 1, not True"),
    ("fused_compile", "false", "None, True or False, not 'false'"),
    ("fused_compile", 1, "None, True or False, not 1"),
    ("fused_share_prompts", 1, "True or False, not 1"),
    ("fused_share_prompts", None, "True or False, not None"),
    ("fused_skip_old_logps", "auto", "None, True or False, not 'auto'"),
    ("fused_skip_old_logps", 0, "None, True or False, not 0"),
    ("fused_max_tokens_per_forward", "auto", "None or a whole number from 0 on, not 'auto'"),
    ("fused_max_tokens_per_forward", 1.5, "None or a whole number from 0 on, not 1.5"),
    ("fused_max_tokens_per_forward", -1, "None or a whole number from 0 on, not -1"),
    ("fused_verify", 0.5, "a whole number from 0 on, not 0.5"),
    ("fused_verify", True, "a whole number from 0 on, not True"),
    ("fused_verify", None, "a whole number from 0 on, not None"),
    ("fused_logits_mib", "75", "None or a positive number, not '75'"),
    ("fused_logits_mib", 0, "None or a positive number, not 0"),
    ("fused_layout", "dense", 'None, "packed" or "padded", not \'dense\''),
    ("fused_layout", "auto", 'None, "packed" or "padded", not \'auto\''),
    ("fused_backward", "auto", 'None, "forecast" or "recompute", not \'auto\''),
    ("kl_estimator", "k5", '"k1", "k2", "k3" or "k4", not \'k5\''),
]


@pytest.mark.parametrize(("option", "value", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_value_that_an_option_cannot_have_is_refused(tmp_path, option, value, message):
    expected = re.escape(f"{option} must be {message}.")
    for refuse in (
        lambda options: made(tmp_path, **options),
        lambda options: made(tmp_path, FusedRLOOConfig, **options),
        lambda options: patch(**options),
        lambda options: FusedOptions(**options),
    ):
        with pytest.raises(ValueError, match=expected):
            refuse({option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"fused_memory": 1, "fused_logits_mib": 75, "fused_verify": 3, "fused_max_tokens_per_forward": 0},
        {"fused_memory": 0.5, "fused_logits_mib": 0.5, "fused_skip_old_logps": False, "fused_backward": "recompute"},
        dict.fromkeys(name for name, default in vars(FusedOptions()).items() if default is None),
    ],
    ids=["whole numbers", "others", "None"],
)
def test_a_value_that_an_option_may_have_is_kept(tmp_path, options):
    args = made(tmp_path, **options)
    assert {name: getattr(args, name) for name in options} == options
    assert vars(FusedOptions.from_args(args)) == {**vars(FusedOptions()), **options}


@pytest.mark.parametrize(
    ("line", "value"),
    [("fused_compile: 'false'", False), ("fused_skip_old_logps: null", None), ("fused_memory: '0.5'", 0.5)],
)
def test_yaml_gives_the_types(tmp_path, line, value):
    file = tmp_path / "grpo.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{line}\n")
    (args,) = trl.TrlParser(FusedGRPOConfig).parse_args_and_config(["--config", str(file)])
    assert getattr(args, line.partition(":")[0]) is value or getattr(args, line.partition(":")[0]) == value


def test_what_is_said_of_an_option_is_what_is_allowed():
    assert KL_ESTIMATORS == objective.KL_ESTIMATORS
    assert all(allowed_values(name) for name in vars(FusedOptions()))
    documented = FusedGRPOConfig.__doc__
    places = [documented.index(f"        {name} (") for name in vars(FusedOptions())]
    assert places == sorted(places)  # the basic ones first
    assert BASIC_OPTIONS[-1] == "kl_estimator"


def test_options_of_a_loss_that_is_off_are_said_to_have_no_effect(tmp_path, caplog):
    made(tmp_path, use_liger_loss=False)
    made(tmp_path, fused_layout="packed")
    assert not caplog.messages
    made(tmp_path, use_liger_loss=False, fused_layout="packed", fused_share_prompts=False)
    made(tmp_path, FusedRLOOConfig, use_liger_loss=False, fused_verify=2)
    assert caplog.messages == [
        "fused_layout='packed', fused_share_prompts=False: no effect, because use_liger_loss=False.",
        "fused_verify=2: no effect, because use_liger_loss=False.",
    ]


def test_positional_arguments_stay_trls(tmp_path):
    assert FusedGRPOConfig(str(tmp_path), use_cpu=True, bf16=False).output_dir == str(tmp_path)
    assert GRPOConfig(str(tmp_path), use_cpu=True, bf16=False).output_dir == str(tmp_path)
