"""The script of a user, what stock makes of it, and an environment that has the built wheel."""

import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .processes import ROOT, run_python
from .stock_script import assert_stock, told_by, write_files


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
    assert_stock(told)
    return told["log"]


BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run_python("-c", BUILD, folder, folder=ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site_packages(wheel, tmp_path_factory):
    """`site-packages` of an environment that has the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", there, wheel)
    (there / "libraries.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    return there


@pytest.fixture(scope="module")
def python(site_packages):
    """Python of that environment. This checkout is not on its path."""
    base = next(parent for parent in site_packages.parents if (parent / "pyvenv.cfg").exists())
    path = Path(sysconfig.get_path("scripts", vars={"base": str(base)})) / Path(sys.executable).name
    where = "from importlib.util import find_spec; print(find_spec('trl_fused_grpo').origin)"
    found = run_python("-c", where, python=path, folder=base).stdout.strip()
    assert Path(found).is_relative_to(site_packages)
    return path


@pytest.fixture(scope="module")
def cli(site_packages):
    """`trl-fused-grpo` of that environment: a script for its Python."""
    return site_packages / "bin" / "trl-fused-grpo"
