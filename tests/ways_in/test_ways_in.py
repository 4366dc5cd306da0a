"""An unmodified script trains as stock with the fused loss, whichever way it was switched on."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from typer.testing import CliRunner

from trl_fused_grpo import FusedGRPOTrainer, patch
from trl_fused_grpo._compat.required import TRANSFORMERS
from trl_fused_grpo.cli import app
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.defaults import patched_options

from .stock_script import assert_fused_and_equal, told_by, write_files, write_yaml


ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "startup"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("ways"))


@pytest.fixture
def train(script, monkeypatch):
    """Run the script in this process, and return what it tells."""
    monkeypatch.syspath_prepend(str(script.parent))

    def run(name):
        monkeypatch.setattr(sys, "argv", [str(script), str(script.parent), name])
        runpy.run_path(str(script), run_name="__main__")
        return told_by(script.parent, name)

    return run


@pytest.fixture
def stock(train):
    """The log of the same script in TRL alone."""
    told = train("stock.json")
    assert told["class"] == "GRPOTrainer" and not any("fused/rows_recomputed" in entry for entry in told["log"])
    return told["log"]


def run_python(*words, folder, **variables):
    """Run Python in a folder, with this package and the variables; fails where it does."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    run = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run


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


def test_the_variable_trains_as_stock(stock, script):
    """In a process that reads `trl_fused_grpo.pth` as Python does at its start."""
    start = f"import runpy, site; site.addsitedir({str(STARTUP)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import sys; sys.argv = {[str(script), str(script.parent), 'variable.json']!r}; {start}"
    run_python("-c", code, folder=script.parent, TRL_FUSED_GRPO="fused_layout=aligned")
    told = told_by(script.parent, "variable.json")
    assert told["class"] == "FusedGRPOTrainer"
    assert_fused_and_equal(told["log"], stock, rounded=TRANSFORMERS.major < 5)


def test_trls_own_command_trains_as_stock_from_a_yaml_file(stock, script):
    folder = script.parent
    file = write_yaml(folder, fused_layout="aligned")
    words = ("--config", str(file), "--kl_estimator", "k3", "--num_processes", "1")
    run_python("-m", "trl_fused_grpo", "grpo", *words, folder=folder)
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert_fused_and_equal(state["log_history"], stock, rounded=TRANSFORMERS.major < 5)


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
