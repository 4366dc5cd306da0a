"""An unmodified script trains as stock with the fused loss. In this process; `test_wheel.py` has others."""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import trl
from typer.testing import CliRunner

from trl_fused_grpo import FusedGRPOTrainer, patch
from trl_fused_grpo.cli import app, main
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.options import patched_options

from .stock_script import assert_fused_and_equal, told_by


def run(*words):
    """`trl-fused-grpo run`. Returns its exit code; what else ends it is raised, and Python shows it."""
    line = ["trl-fused-grpo", "run", *map(str, words)]
    with mock.patch.object(sys, "argv", line):
        try:
            main()
        except SystemExit as end:
            return end.code
        finally:
            assert sys.argv is line
    return 0


def test_patch_and_run_train_as_stock(train, stock, script):
    with patch():
        patched = train("patched.json")
    assert patched["class"] == "FusedGRPOTrainer"
    assert_fused_and_equal(patched["log"], stock)
    assert run("--fused-layout", "padded", script, script.parent, "run.json") == 0
    assert_fused_and_equal(told_by(script.parent, "run.json")["log"], stock)


TELLING = """
import json, sys, trl
from trl_fused_grpo.options import patched_options
if __name__ == "__main__":
    told = [sys.argv, sys.path[0], trl.GRPOTrainer.__name__, patched_options().fused_layout]
    open(sys.argv[1], "w").write(json.dumps(told))
    sys.exit(3)
"""


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_a_script_runs_as_python_would_run_it(tmp_path, monkeypatch, is_module):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "telling.py").write_text(TELLING)
    name = ("-m", "scripts.telling") if is_module else (folder / "telling.py",)
    arguments = [str(tmp_path / "told.json"), "--fused_layout", "dense", "--", "-m", "--help"]
    before, main_module = [*sys.path], sys.modules["__main__"]
    assert run("--fused_layout", "packed", "--fused-skip-old-logps", "none", *name, *arguments) == 3
    argv, path, trainer, layout = json.loads((tmp_path / "told.json").read_text())
    assert argv == [str(folder / "telling.py"), *arguments]
    assert path == str(tmp_path if is_module else folder)
    assert (trainer, layout) == ("FusedGRPOTrainer", "packed")
    assert sys.path == before and sys.modules["__main__"] is main_module
    assert trl.GRPOTrainer is not FusedGRPOTrainer and patched_options() is None


ASKING = """
import os, sys
os.chdir("..")
raise EOFError(sys.argv[0], __file__)
"""


def test_a_script_is_named_as_it_was_typed_and_knows_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    monkeypatch.chdir(tmp_path)
    asking = Path("scripts", "asking.py")
    asking.write_text(ASKING)
    with pytest.raises(EOFError) as error:
        run(asking)
    assert error.value.args == (str(asking), str(tmp_path / asking))
    assert error.traceback[-1].path == tmp_path / asking


OF_THE_COMMAND_LINE = ("typer.Exit(6)", "typer.Abort()", "typer.BadParameter('value')", "EOFError()")


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize("error", [*OF_THE_COMMAND_LINE, "OSError(32, 'pipe')", "KeyboardInterrupt()", "ValueError()"])
def test_what_a_script_raises_is_left_to_python(error, is_module, tmp_path, monkeypatch):
    """typer would end most of them itself: without a traceback, and with an exit code of its own."""
    monkeypatch.chdir(tmp_path)
    Path("raising.py").write_text(f"import typer\nerror = {error}\nraise error")
    with pytest.raises(BaseException) as raised:
        run(*(["-m", "raising"] if is_module else ["raising.py"]))
    assert raised.traceback[-1].path == tmp_path / "raising.py"
    assert raised.value is raised.traceback[-1].frame.f_globals["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: SCRIPT"),
        (("gone.py",), "there is no file gone.py"),
        (("--fused_layout", "dense", __file__), "fused_layout must be"),
        (
            ("--fused_memory", "80%", __file__),
            "fused_memory must be None or a fraction above 0 and at most 1, not '80%'",
        ),
        (("--fused_layot", "packed", __file__), "there is no option --fused_layot; did you mean --fused_layout?"),
        (("-m", "nope"), "there is no module nope that can be run"),
        (("-m", "nope.train"), "there is no module nope.train that can be run"),
        (("-m", "json"), "there is no module json that can be run"),
    ],
    ids=["no-script", "no-file", "value", "number", "name", "no-module", "no-package", "package"],
)
def test_a_command_line_that_cannot_be_run_says_why(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("trl-fused-grpo run: ") and message in line


@pytest.mark.parametrize(
    ("code", "is_said"),
    [
        ("pass", True),
        ("import sys; sys.exit(0)", True),
        ("import json; json.loads('{')", False),
        ("import trl\ntry: trl.GRPOTrainer('gone', reward_funcs=[])\nexcept Exception: pass", False),
    ],
    ids=["no trainer", "exit", "error", "trainer"],
)
def test_a_script_that_makes_no_trainer_is_said_to_have_fused_nothing(code, is_said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(code)
    with contextlib.suppress(ValueError):
        run("plain.py")
    told = (
        "plain.py has made no GRPOTrainer or RLOOTrainer in this process: nothing was fused." in capsys.readouterr().err
    )
    assert told is is_said


def test_help_of_run_shows_choices_and_defaults(capsys):
    assert run("--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert 'None, "packed" or "padded"; default: None.' in told
    assert "True or False; default: True." in told
    assert (
        told.index("--fused_memory VALUE, --fused-memory")
        < told.index("rarely needed")
        < told.index("--fused_share_prompts VALUE, ")
    )


def test_parity_compares_with_stock_whatever_is_patched():
    with patch(fused_layout="padded"):
        result = CliRunner().invoke(app, ["parity", "--device", "cpu", "--case", "grpo-off-policy"])
        assert patched_options() == FusedOptions(fused_layout="padded")
    assert result.exit_code == 0 and "1 equal" in result.output, result.output
