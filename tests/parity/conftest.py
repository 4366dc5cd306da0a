"""The commands in this process, settings of a comparison, and another class in place of the fused trainer."""

from functools import partial

import pytest
from typer.testing import CliRunner

from tests.harness import command
from trl_fused_grpo.cli import app
from trl_fused_grpo.parity import Settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """On the CPU, with checkpoints that the tests of a file share."""
    return Settings(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def run_command(monkeypatch):
    """Run a command on the CPU and return its result."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(app, command, *arguments: str):
        result = CliRunner().invoke(app, [*command, "--device", "cpu", *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def parity(run_command):
    """`trl-fused-grpo parity`."""
    return partial(run_command, app, ["parity"])


@pytest.fixture
def harness(run_command):
    """`python -m tests.harness`."""
    return partial(run_command, command.app, [])


@pytest.fixture
def replace_trainer(monkeypatch):
    """Put another class in place of the fused trainer."""
    return lambda cls: monkeypatch.setattr("trl_fused_grpo.FusedGRPOTrainer", cls)
