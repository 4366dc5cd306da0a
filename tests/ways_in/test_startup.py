"""The import hook of `TRL_FUSED_GRPO`: inert without it, harmless where it fails, and in the wheel."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from .stock_script import told_by, write_files


pytestmark = pytest.mark.any_trl

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "startup"
LOADED = """
import site, sys
site.addsitedir(sys.argv[1])
print(*(name in sys.modules for name in ("_trl_fused_grpo_startup", "trl_fused_grpo", "trl", "torch")))
"""


def run_python(*words, python=sys.executable, variable=None, folder=None):
    env = {name: value for name, value in os.environ.items() if name not in ("TRL_FUSED_GRPO", "PYTHONPATH")}
    env.update({"TRL_FUSED_GRPO": variable} if variable is not None else {}, OMP_NUM_THREADS="1")
    return subprocess.run([str(python), *map(str, words)], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variable", "loaded"),
    [
        *((variable, "False False False False") for variable in (None, "", "0")),
        ("1", "True False False False"),
    ],
)
def test_python_starts_without_importing_anything_else(variable, loaded):
    run = run_python("-c", LOADED, STARTUP, variable=variable)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, loaded, "")


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


BUILD = """
import sys
from hatchling.build import build_editable, build_wheel
build_wheel(sys.argv[1])
build_editable(sys.argv[2])
"""
CHILD = """
import json, multiprocessing, sys

def tell(queue):
    import trl_fused_grpo  # before TRL: it is not complete when TRL's trainer has been loaded
    import trl
    queue.put(trl.GRPOTrainer.__name__)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=tell, args=(queue,))
    process.start()
    print(queue.get(timeout=200))
    process.join()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel and the wheel of an editable installation."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("standard", "editable"):
        (folder / name).mkdir()
    run = run_python("-c", BUILD, folder / "standard", folder / "editable", folder=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return tuple(next((folder / name).glob("*.whl")) for name in ("standard", "editable"))


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory):
    """Python of an environment that has the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site_packages, wheels[0])
    run = run_python(*install)
    assert run.returncode == 0, run.stderr[-2000:]
    (site_packages / "libraries.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    return Path(sysconfig.get_path("scripts", vars={"base": str(folder)})) / Path(sys.executable).name


def test_both_wheels_have_the_hook(wheels):
    for wheel in wheels:
        assert {"trl_fused_grpo.pth", "_trl_fused_grpo_startup.py"} <= {*zipfile.ZipFile(wheel).namelist()}


def test_the_wheel_fuses_scripts_and_the_processes_that_they_start(python, tmp_path):
    script = write_files(tmp_path)
    run = run_python(script, tmp_path, "told.json", python=python, variable="fused_layout=aligned", folder=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    told = told_by(tmp_path, "told.json")
    assert told["class"] == "FusedGRPOTrainer"
    assert any("fused/rows_recomputed" in entry for entry in told["log"])
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    run = run_python(child, python=python, variable="1", folder=tmp_path)
    assert run.stdout.split()[-1] == "FusedGRPOTrainer", run.stderr[-2000:]


def test_an_error_in_the_wheels_hook_is_said_when_trl_is_imported(python, tmp_path):
    code = (
        "import trl, trl.trainer.grpo_config; from trl import GRPOTrainer; print('imported'); GRPOTrainer('model', len)"
    )
    run = run_python("-c", code, python=python, variable="fused_layout=dense", folder=tmp_path)
    assert run.returncode == 1 and run.stdout == "imported\n"
    said = 'fused_layout must be "auto", "packed", "aligned" or "padded", not \'dense\''
    assert "WARNING: TRL_FUSED_GRPO=fused_layout=dense cannot be heeded: " in run.stderr
    assert run.stderr.count(said) >= 2 and "RuntimeError: " in run.stderr
