"""The import hook of `TRL_FUSED_GRPO`: inert without it, harmless where it fails. `test_wheel.py` trains with it."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from .processes import ROOT, run_python


pytestmark = pytest.mark.any_trl

STARTUP = ROOT / "startup"
LOADED = """
import site, sys
site.addsitedir(sys.argv[1])
print(*(name in sys.modules for name in ("_trl_fused_grpo_startup", "trl_fused_grpo", "trl", "torch")))
"""


@pytest.mark.parametrize(
    ("variable", "loaded"),
    [
        *((variable, "False False False False") for variable in (None, "", "0")),
        ("1", "True False False False"),
    ],
)
def test_python_starts_without_importing_anything_else(variable, loaded):
    run = run_python("-c", LOADED, STARTUP, variable=variable)
    assert (run.stdout.strip(), run.stderr) == (loaded, "")


@pytest.fixture
def startup(monkeypatch):
    """The module that the variable starts, with its finder, which goes with the test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    spec = spec_from_file_location("_trl_fused_grpo_startup", STARTUP / "_trl_fused_grpo_startup.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_that_cannot_be_imported_is_said_and_no_trainer_is_made(startup, monkeypatch, capsys):
    trainer_module = ModuleType("trl.trainer.grpo_trainer")
    trainer_module.GRPOTrainer = type("GRPOTrainer", (), {})
    monkeypatch.setenv("TRL_FUSED_GRPO", "fused_layout=dense")
    monkeypatch.setitem(sys.modules, "trl_fused_grpo", None)
    startup._import_package(trainer_module)
    assert "WARNING: TRL_FUSED_GRPO=fused_layout=dense cannot be heeded: " in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="Without TRL_FUSED_GRPO=fused_layout=dense TRL trains with its own loss"):
        trainer_module.GRPOTrainer("model", reward_funcs=len)


def test_only_trls_trainer_is_looked_for(startup):
    finder = sys.meta_path[0]
    assert type(finder).__module__ == "_trl_fused_grpo_startup"
    assert finder.find_spec("trl.trainer.grpo_config") is None
    assert finder.find_spec("trl.trainer.grpo_trainer", path=[]) is None
