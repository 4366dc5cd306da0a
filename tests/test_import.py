"""A TRL that lost something which this package builds upon is refused at the import, and what it lost is named."""

import subprocess
import sys

from packaging.version import Version

from trl_fused_grpo._compat import required as _trl_check


LOSING = """
import importlib, inspect, sys, types, warnings
warnings.simplefilter("ignore")
import accelerate, trl
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
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
    names = tuple("another_name" if n == name else n for n in code.co_names)
    consts = tuple(renamed(c, name) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_names=names, co_consts=consts)

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
for name in ACCELERATOR:
    print("Accelerator", name, without(accelerate.Accelerator, name), sep="|")
print("DeepSpeedEngineWrapper", "backward", without(DeepSpeedEngineWrapper, "backward"), sep="|")
assert outcome() == "imported", outcome()
"""


def expected(names):
    return [name for since, group in names.items() if Version(since) <= _trl_check.TRL for name in group]


def test_every_name_that_a_host_lost_is_named_by_an_import_error():
    names = {
        "METHODS": _trl_check.METHODS,
        "ATTRIBUTES": expected(_trl_check.ATTRIBUTES),
        "OPTIONS": expected(_trl_check.OPTIONS),
        "ACCELERATOR": _trl_check.ACCELERATOR,
    }
    code = "".join(f"{name} = {list(values)!r}\n" for name, values in names.items()) + LOSING
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split("|") for line in run.stdout.splitlines() if line.count("|") == 2]
    assert len(lines) == sum(map(len, names.values()))  # `__init__` is never lost, DeepSpeed's wrapper comes on top
    wrong = {
        name: message
        for owner, name, message in lines
        if f"its {owner} has no {name};" not in message + ";" and f"its {owner} has no {name})" not in message
    }
    assert not wrong


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
