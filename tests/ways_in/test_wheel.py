"""
The built wheel in an environment of its own, where this checkout is on no path: each way in fuses a script that knows
TRL alone, and the script logs what stock logs. Stock is the same script in the process of the test.
"""

import json

import pytest

from trl_fused_grpo._compat.required import NEWEST_TRL, TRANSFORMERS, TRL

from .processes import run_python
from .stock_script import assert_fused_and_equal, assert_own_loss, assert_stock, told_by, write_yaml


# First as it is, then patched
PATCHED = """
import runpy, sys

runpy.run_path("train.py", run_name="__main__")
assert not any(name.startswith("trl_fused_grpo") for name in sys.modules)
from trl_fused_grpo import patch
patch()
sys.argv[2] = "patched.json"
runpy.run_path("train.py", run_name="__main__")
"""
# Fused, then with TRL's own loss
TWICE = """
import functools, runpy, sys, trl

runpy.run_path("train.py", run_name="__main__")
trl.GRPOConfig = functools.partial(trl.GRPOConfig, use_liger_loss=False)
sys.argv[2] = "own.json"
runpy.run_path("train.py", run_name="__main__")
"""
ROUNDED = TRANSFORMERS.major < 5
PROCESSES = 2


@pytest.mark.nightly
def test_a_script_trains_as_stock_until_it_is_patched_and_after(python, script, stock):
    folder = script.parent
    (folder / "patched.py").write_text(PATCHED)
    run_python("patched.py", folder, "installed.json", python=python, folder=folder)
    installed, patched = (told_by(folder, name) for name in ("installed.json", "patched.json"))
    assert_stock(installed)
    assert patched["class"] == "FusedGRPOTrainer"
    for log in (installed["log"], stock):
        assert_fused_and_equal(patched["log"], log, rounded=ROUNDED)


def test_an_unmodified_script_trains_as_stock(python, cli, script, stock):
    run_python(cli, "run", script, script.parent, "run.json", python=python, folder=script.parent)
    told = told_by(script.parent, "run.json")
    assert told["class"] == "FusedGRPOTrainer"
    assert_fused_and_equal(told["log"], stock, rounded=ROUNDED)


@pytest.mark.nightly
def test_a_script_that_raises_ends_as_python_ends_it(python, cli, tmp_path):
    """Also with an exception that typer would take for its own command's end."""
    (tmp_path / "raising.py").write_text("import sys, typer; print(sys.argv[0]); raise typer.Exit(6)")
    words, options = ("raising.py",), {"python": python, "folder": tmp_path, "succeeds": False}
    plain, run = run_python(*words, **options), run_python(cli, "run", *words, **options)
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout) == (1, "raising.py\n")
    first_line = "Traceback (most recent call last):\n"  # the package's own lines come behind it
    assert first_line in run.stderr and run.stderr.endswith(plain.stderr.removeprefix(first_line))


@pytest.mark.nightly
def test_trls_own_command_trains_as_stock_from_a_yaml_file(python, cli, script, stock):
    folder = script.parent
    file = write_yaml(folder, fused_layout="padded")
    words = ("--config", file, "--kl_estimator", "k3", "--num_processes", "1")
    run_python(cli, "grpo", *words, python=python, folder=folder)
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert_fused_and_equal(state["log_history"], stock, rounded=ROUNDED)


def launch(*words, python, folder):
    """
    As `accelerate launch --multi_gpu` does, whose processes find each other on the CPU too; with `--cpu` each would
    train alone.
    """
    options = ["--multi_gpu", "--num_processes", PROCESSES, "--mixed_precision", "no", "--main_process_port", 0]
    run_python("-m", "accelerate.commands.launch", *options, *words, python=python, folder=folder)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.skipif(TRL < NEWEST_TRL, reason="one release is enough for several processes")
@pytest.mark.parametrize("beside", ["TRL's own loss", "stock"])
def test_processes_of_a_launcher_train_as_stock(beside, python, script):
    """Beside the same script with `use_liger_loss=False` in the same processes, or in TRL alone by a second launch."""
    folder = script.parent
    (folder / "twice.py").write_text(TWICE)
    launched = script if beside == "stock" else folder / "twice.py"
    launch("-m", "trl_fused_grpo", "run", launched, folder, "fused.json", python=python, folder=folder)
    if beside == "stock":
        launch(script, folder, "own.json", python=python, folder=folder)
        assert_stock(told_by(folder, "own.json"))
    fused, own = (told_by(folder, name) for name in ("fused.json", "own.json"))
    assert fused["class"] == "FusedGRPOTrainer"
    assert fused["processes"] == own["processes"] == PROCESSES
    assert_own_loss(own["log"])
    assert_fused_and_equal(fused["log"], own["log"])
