"""`trl-fused-grpo run` runs a script or a module with every `GRPOTrainer` and `RLOOTrainer` of it fused."""

import os
import runpy
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

import typer

from trl_fused_grpo import FusedGRPOConfig, patch
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.defaults import PATCHES, read_option, write_options
from trl_fused_grpo.patching import VARIABLE


def run(context: typer.Context) -> None:
    """
    Run a script of yours, unchanged, with the fused loss in all its trainers: run [OPTIONS] [-m] SCRIPT [ARGUMENTS].

    What follows the script is the script's. With several processes: accelerate launch -m trl_fused_grpo run SCRIPT.
    """
    parser = command_line()
    words = vars(parser.parse_args(context.args))
    is_module, script, arguments = words.pop("module"), words.pop("script"), words.pop("arguments")
    try:
        options = {name: read_option(name, text) for name, text in words.items()}
    except ValueError as error:
        parser.error(str(error))
    if not is_module and not Path(script).exists():
        parser.error(f"there is no file {script}.")
    try:
        run_patched(script, arguments, options, is_module)
    except (EOFError, OSError, KeyboardInterrupt) as error:
        # The command line would take these for its own and say "Aborted" alone, or nothing
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def command_line() -> ArgumentParser:
    """The parser of what follows `trl-fused-grpo run`; values of options are text."""
    parser = ArgumentParser(
        "trl-fused-grpo run",
        allow_abbrev=False,
        description="Run a script with the fused loss in all its trainers. Options stand before the script.",
    )
    for name in vars(FusedOptions()):
        told = FusedGRPOConfig.__dataclass_fields__[name].metadata["help"]
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, dest=name, metavar="VALUE", default=SUPPRESS, help=told)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as of python -m.")
    parser.add_argument("script", metavar="SCRIPT", help="What to run, as python would.")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=REMAINDER, help="The script's own arguments.")
    return parser


def run_patched(script: str, arguments: list[str], options: dict[str, Any], is_module: bool) -> None:
    """
    Run a script, or a module, as `__main__`, with [`patch`] around it. Processes that it starts are patched through the
    variable `TRL_FUSED_GRPO`.

    Args:
        script (`str`): path of a script, or a module's name.
        arguments (`list[str]`): `sys.argv` after the script.
        options (`dict`): of [`patch`].
        is_module (`bool`): whether `script` is a module's name.
    """
    kept = sys.argv, [*sys.path], os.environ.get(VARIABLE)
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)  # as Python does
    sys.excepthook = sys.__excepthook__  # an error of the script shows as without this command
    try:
        with patch(**options):
            # With what the variable said before, which is in force here too
            os.environ[VARIABLE] = write_options({name: one[name] for one in PATCHES for name in one})
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(script), run_name="__main__")  # Python's `__file__` is absolute
    finally:
        sys.argv, sys.path[:] = kept[:2]
        os.environ.pop(VARIABLE, None)
        if kept[2] is not None:
            os.environ[VARIABLE] = kept[2]
