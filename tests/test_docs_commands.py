"""The command lines of README, CONTRIBUTING and docs/ are ones that work; so are those of the workflows."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from typer.testing import CliRunner

from tests.docs_pages import BLOCKS, ROOT, name_of
from tests.harness.command import app as harness
from trl_fused_grpo import FusedGRPOConfig
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.cli import app as cli
from trl_fused_grpo.cli.run import command_line as run_parser
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.defaults import read_option


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))


def shell_lines():
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{block}: {' '.join(words)}")


def check_make(words, monkeypatch):
    targets = [word for word in words if "=" not in word]
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    assert set(targets) <= TARGETS
    assert all(f"$({name})" in MAKEFILE for name in variables)
    if variables.get("ARGS"):
        assert targets == ["demo"]
        check_script(["examples/train_arithmetic.py", *shlex.split(variables["ARGS"])], monkeypatch)


def check_cli(words, monkeypatch):
    """One case runs. What runs many cases lists them. A training's options are those that there are."""
    if words[0] == "run":
        options = vars(run_parser().parse_args(words[1:]))
        assert options.pop("module") or Path(options["script"]).suffix == ".py"
        for name in FusedOptions.__dataclass_fields__.keys() & options:
            read_option(name, options[name])
        return
    if words[0] == "grpo":
        names = {word.removeprefix("--") for word in words if word.startswith("--")} - {"config"}
        launch = {action.dest for action in launch_command_parser()._actions}
        assert names <= FusedGRPOConfig.__dataclass_fields__.keys() | launch
        return
    is_short = {"--help", "--list", "--case", "doctor"} & set(words)
    result = CliRunner().invoke(cli, words if is_short else [*words, "--list"])
    assert result.exit_code == 0, result.output


def check_harness(words, monkeypatch):
    """One case runs, or is drawn. What runs many cases lists them."""
    if "--random" in words:
        place = words.index("--random") + 1
        words = [*words[:place], "1", *words[place + 1 :]]
    is_short = {"--case", "--random"} & set(words)
    result = CliRunner().invoke(harness, words if is_short else [*words, "--list"])
    assert result.exit_code == 0, result.output


def check_accelerate(words, monkeypatch):
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    if args.module:
        check_python(["-m", args.training_script, *args.training_script_args], monkeypatch)


def check_script(words, monkeypatch):
    """The arguments are those of the script's own command line; nothing runs."""
    path = ROOT / words[0]
    assert path.exists()
    if TRL < NEWEST_TRL:
        pytest.skip("benchmarks and examples are written for the newest TRL")
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("script_of_the_docs", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_of_the_docs", script)
    try:
        spec.loader.exec_module(script)
    finally:
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == path.parent:
                del sys.modules[name]
    app = typer.Typer()
    app.command()(script.main)
    typer.main.get_command(app).make_context(path.name, words[1:])


def check_pytest(words, monkeypatch):
    takes_value = ("-k", "-m", "-n")
    paths = [word for before, word in zip(["", *words], words, strict=False) if before not in takes_value]
    for word in paths:
        assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), word


def check_python(words, monkeypatch):
    modules = {"pytest": check_pytest, "trl_fused_grpo": check_cli, "pip": check_pip, "tests.harness": check_harness}
    if words[0] == "-m":
        modules[words[1]](words[2:], monkeypatch)
    else:
        check_script(words, monkeypatch)


def check_pip(words, monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", project, re.DOTALL)[1]
    extras = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    assert words[0] == "install"
    for word in words[1:]:
        name, _, asked_for = word.rstrip("]").partition("[")
        assert word in ("-e", "--editable") or name in (".", re.search(r'^name = "(.*)"', project, re.MULTILINE)[1])
        assert set(filter(None, asked_for.split(","))) <= extras


def check_nox(words, monkeypatch):
    option, session = words
    name, _, version = session.rstrip(")").partition("(")
    assert option == "--session"
    assert f"def {name}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert not version or (ROOT / "constraints" / f"{name}-{version}.txt").exists()


COMMANDS = {
    "accelerate": check_accelerate,
    "make": check_make,
    "trl-fused-grpo": check_cli,
    "pip": check_pip,
    "python": check_python,
    "pytest": check_pytest,
    "nox": check_nox,
}


@pytest.mark.parametrize("words", list(shell_lines()))
def test_a_command_line_is_one_that_works(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    COMMANDS[words[0].removeprefix(".venv/bin/")](words[1:], monkeypatch)


def make_targets(workflow):
    """Every target that a step makes, those that come from the job's own matrix spelled out."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([\w-]+|\$\{\{ matrix\.\w+ \}\})", step.get("run", "")):
                found = re.search(r"matrix\.(\w+)", target)
                yield from matrix[found[1]] if found else [target]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_makes_what_exists(path):
    workflow = pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))
    targets = set(make_targets(workflow))
    assert {"lint", "quick", "matrix", "oldest", "newest"} <= targets
    assert targets <= TARGETS
