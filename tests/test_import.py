"""A TRL that lost something which this package builds upon is refused at the import, and what it lost is named."""

import subprocess
import sys

import pytest
from packaging.version import Version

from trl_fused_grpo._compat import required


LOSING = """
import importlib, inspect, sys, types, warnings
warnings.simplefilter("ignore")
import trl
from trl import GRPOConfig, GRPOTrainer

def outcome():
    for name in [n for n in sys.modules if n.split(".")[0] == "trl_fused_grpo"]:
        del sys.modules[name]
    try:
        importlib.import_module("trl_fused_grpo._compat.trl")
    except ImportError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__} instead of ImportError: {error}"
    return "imported"

def without(owner, name):
    homes = [cls for cls in owner.__mro__ if name in vars(cls) and cls is not object]
    kept = [(home, vars(home)[name]) for home in homes]
    for home in homes:
        delattr(home, name)
    result = outcome()
    for home, value in kept:
        setattr(home, name, value)
    return result

def renamed(code, name):
    kinds = ("co_names", "co_varnames", "co_cellvars", "co_freevars")
    names = {kind: tuple("another_name" if n == name else n for n in getattr(code, kind)) for kind in kinds}
    consts = tuple(renamed(c, name) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(**names, co_consts=consts)

def without_attribute(name):
    kept, hidden = [], []
    for cls in GRPOTrainer.__mro__[:-1]:
        if name in vars(cls):
            hidden.append((cls, vars(cls)[name]))
            delattr(cls, name)
        for method in vars(cls).values():
            method = inspect.unwrap(method) if callable(method) else method
            if isinstance(method, types.FunctionType) and cls.__module__.startswith("trl."):
                kept.append((method, method.__code__))
                method.__code__ = renamed(method.__code__, name)
    result = outcome()
    for method, code in kept:
        method.__code__ = code
    for cls, value in hidden:
        setattr(cls, name, value)
    return result

def without_option(name):
    kept = GRPOConfig.__dataclass_fields__.pop(name)
    result = outcome()
    GRPOConfig.__dataclass_fields__[name] = kept
    return result

assert outcome() == "imported", outcome()
for name in METHODS:
    if name != "__init__":
        print("GRPOTrainer", name, without(GRPOTrainer, name), sep="|")
for name in ATTRIBUTES:
    print("GRPOTrainer", name, without_attribute(name), sep="|")
for name in OPTIONS:
    print("GRPOConfig", name, without_option(name), sep="|")
assert outcome() == "imported", outcome()
"""


def expected(names):
    return [name for since, group in names.items() if Version(since) <= required.TRL for name in group]


@pytest.mark.nightly
def test_every_name_that_a_library_lost_is_named_by_an_import_error():
    names = {
        "METHODS": required.METHODS,
        "ATTRIBUTES": expected(required.ATTRIBUTES),
        "OPTIONS": expected(required.OPTIONS),
    }
    code = "".join(f"{name} = {list(values)!r}\n" for name, values in names.items()) + LOSING
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split("|") for line in run.stdout.splitlines() if line.count("|") == 2]
    assert len(lines) == sum(map(len, names.values())) - 1  # `__init__` is never lost
    wrong = {
        f"{owner}.{name}": message for owner, name, message in lines if not names_what_is_gone(message, owner, name)
    }
    assert not wrong


def names_what_is_gone(message, owner, name):
    return any(f"{owner} has no {name}{end}" in message for end in (";", ")"))


@pytest.mark.nightly
def test_the_whole_package_is_refused_before_anything_else_of_it_runs():
    code = """
from trl import GRPOTrainer
del GRPOTrainer._get_per_token_logps_and_entropies
import trl_fused_grpo
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: trl_fused_grpo cannot extend TRL"), last
    assert "GRPOTrainer has no _get_per_token_logps_and_entropies" in last


OLD_TRL = """
import importlib.metadata, sys
found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.11.4" if name == "trl" else found(name)
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "trl":
            raise ImportError("cannot import name 'GRPOConfig' from 'trl'")
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize("command", [False, True], ids=["import", "command"])
def test_an_old_trl_is_refused_in_our_words_before_anything_is_imported_from_it(command):
    code = "import trl_fused_grpo"
    if command:
        code = "sys.argv = ['trl-fused-grpo', 'doctor']; from trl_fused_grpo.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", f"{OLD_TRL}\n{code}"], capture_output=True, text=True)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    told = f"trl_fused_grpo cannot extend TRL 0.11.4; install trl>={required.OLDEST_TRL},<={required.NEWEST_TRL}."
    assert last.endswith(told), run.stderr
    assert not command or run.stderr.strip().count("\n") == 0
