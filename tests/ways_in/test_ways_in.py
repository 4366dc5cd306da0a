"""An unmodified script trains as stock with the fused loss. In this process; `test_wheel.py` has others."""

import json
import os
import sys
from pathlib import Path

import pytest
import trl
from typer.testing import CliRunner

from trl_fused_grpo import FusedGRPOTrainer, patch
from trl_fused_grpo.cli import app
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.defaults import patched_options

from .stock_script import assert_fused_and_equal, told_by


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_patch_and_run_train_as_stock(train, stock, script):
    with patch():
        patched = train("patched.json")
    assert patched["class"] == "FusedGRPOTrainer"
    assert_fused_and_equal(patched["log"], stock)
    result = command("run", "--fused-layout", "aligned", script, script.parent, "run.json")
    assert result.exit_code == 0, result.output
    assert_fused_and_equal(told_by(script.parent, "run.json")["log"], stock)


TELLING = """
import json, os, sys, trl
if __name__ == "__main__":
    told = [sys.argv, sys.path[0], trl.GRPOTrainer.__name__, os.environ["TRL_FUSED_GRPO"]]
    open(sys.argv[1], "w").write(json.dumps(told))
    sys.exit(3)
"""


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_a_script_runs_as_python_would_run_it(tmp_path, monkeypatch, is_module):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_FUSED_GRPO", "0")
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "telling.py").write_text(TELLING)
    name = ("-m", "scripts.telling") if is_module else (folder / "telling.py",)
    arguments = [str(tmp_path / "told.json"), "--fused_layout", "dense", "--", "-m", "--help"]
    before = sys.argv, [*sys.path]
    result = command("run", "--fused_layout", "packed", "--fused-balance", "none", *name, *arguments)
    assert result.exit_code == 3, result.output
    argv, path, trainer, variable = json.loads((tmp_path / "told.json").read_text())
    assert argv == [str(folder / "telling.py"), *arguments]
    assert path == str(tmp_path if is_module else folder)
    assert (trainer, variable) == ("FusedGRPOTrainer", "fused_layout=packed,fused_balance=None")
    assert (sys.argv, sys.path) == before and os.environ["TRL_FUSED_GRPO"] == "0"
    assert trl.GRPOTrainer is not FusedGRPOTrainer and patched_options() is None


def test_processes_of_a_script_get_the_options_of_every_patch_in_force(tmp_path):
    (tmp_path / "telling.py").write_text(TELLING)
    with patch(fused_lora=False, fused_layout="aligned"):
        command("run", "--fused_layout", "packed", tmp_path / "telling.py", tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text())[3] == "fused_lora=False,fused_layout=packed"


def test_an_error_of_a_script_shows_where_it_comes_from(tmp_path, monkeypatch, capsys):
    """Also one that the command line takes for its own; after a change of folder the script knows where it lies."""
    monkeypatch.chdir(tmp_path)
    Path("asking.py").write_text("import os; os.chdir('..'); raise EOFError(__file__)")
    result = command("run", "asking.py")
    said = result.output + capsys.readouterr().err
    assert result.exit_code == 1 and f"EOFError: {tmp_path / 'asking.py'}" in said and "in <module>" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: SCRIPT"),
        (("gone.py",), "there is no file gone.py"),
        (("--fused_layout", "dense", __file__), "fused_layout must be"),
        (("--fused_layot", "packed", __file__), "unrecognized arguments: --fused_layot"),
    ],
    ids=["no-script", "no-file", "value", "name"],
)
def test_a_command_line_that_cannot_be_run_says_why(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("run", *words)
    assert result.exit_code == 2
    assert message in result.output + capsys.readouterr().err


def test_parity_compares_with_stock_whatever_is_patched():
    with patch(fused_layout="aligned"):
        result = command("parity", "--device", "cpu", "--case", "grpo-off-policy")
        assert patched_options() == FusedOptions(fused_layout="aligned")
    assert result.exit_code == 0 and "1 equal" in result.output, result.output
