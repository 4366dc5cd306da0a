"""`trl-fused-grpo run` runs a script or a module with every `GRPOTrainer` and `RLOOTrainer` of it fused."""

import os
import pkgutil
import runpy
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_fused_grpo.options import BASIC_OPTIONS, FusedOptions, allowed_values, read_option

from .words import OneLineParser, refuse


def run_words(words: list[str]) -> None:
    """Run what these words, which follow `trl-fused-grpo run`, ask for. What the script raises is raised here."""
    parser = command_line()
    parsed = vars(parser.parse_args(words))
    is_module, script, arguments = parsed.pop("module"), parsed.pop("script"), parsed.pop("arguments")
    try:
        options = {name: read_option(name, text) for name, text in parsed.items()}
    except ValueError as error:
        parser.error(str(error))
    if not is_module and not Path(script).exists():
        parser.error(f"there is no file {script}.")
    run_patched(script, arguments, options, is_module)


def command_line() -> ArgumentParser:
    """The parser of what follows `trl-fused-grpo run`; values of options are text."""
    parser = OneLineParser(
        "trl-fused-grpo run",
        allow_abbrev=False,
        description="Run a script with the fused loss in all its trainers. Options stand before the script.",
    )
    basic, rare = (parser.add_argument_group(f"{kind} options") for kind in ("basic", "rarely needed"))
    for name, option in FusedOptions.__dataclass_fields__.items():
        told = f"{option.metadata['help']} {allowed_values(name)}; default: {option.default}."
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        group = basic if name in BASIC_OPTIONS else rare
        group.add_argument(*names, dest=name, metavar="VALUE", default=SUPPRESS, help=told)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as of python -m.")
    parser.add_argument("script", metavar="SCRIPT", help="What to run, as python would.")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=REMAINDER, help="The script's own arguments.")
    return parser


def run_patched(script: str, arguments: list[str], options: dict[str, Any], is_module: bool) -> None:
    """
    Run a script, or a module, as `__main__`, with [`patch`] around it. Processes that it starts itself are not patched.
    """
    kept = sys.argv, [*sys.path]
    sys.argv = ["-m" if is_module else script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)  # as Python does
    try:
        if is_module and find_spec(script.partition(".")[0]) is None:  # before torch is loaded
            refuse("run", f"there is no module {script} that can be run.")
        from trl_fused_grpo import patch

        with patch(**options) as handle:
            before = handle.trainers_made
            if is_module:
                _check_module(script)
            try:
                _run(script, is_module)
            finally:
                is_error = not isinstance(sys.exc_info()[1], SystemExit | None)
                if handle.trainers_made == before and not is_error:
                    told = "has made no GRPOTrainer or RLOOTrainer in this process: nothing was fused."
                    print(f"trl-fused-grpo run: {script} {told}", file=sys.stderr)
    finally:
        sys.argv, sys.path[:] = kept


def _check_module(name: str) -> None:
    """End the process where there is no module to run."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the package above it lacks another
        spec = None
    if spec is None:
        refuse("run", f"there is no module {name} that can be run.")


def _run(script: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        _run_file(os.path.abspath(script))


def _run_file(path: str) -> None:
    """Run a file as Python does: `__file__` is absolute, and `sys.argv[0]`, which `runpy` would set too, as typed."""
    if path.endswith(".pyc") or pkgutil.get_importer(path):  # a folder or a zip file
        runpy.run_path(path, run_name="__main__")
        return
    kept, main, loader = sys.modules["__main__"], ModuleType("__main__"), SourceFileLoader("__main__", path)
    main.__file__, main.__loader__ = path, loader
    sys.modules["__main__"] = main
    try:
        exec(loader.source_to_code(loader.get_data(path), path), vars(main))
    finally:
        sys.modules["__main__"] = kept
