"""TRL's command line, which differs between releases of TRL."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import trl
from accelerate.commands.launch import launch_command, launch_command_parser

from .required import TRL


def run_grpo_command(arguments: list[str], config: type, module: str) -> None:
    """
    Run `trl grpo` with other options and another script: TRL parses, and starts processes through `accelerate launch`.
    """

    def launch(args: argparse.Namespace) -> None:
        args.training_script, args.module = module, True
        launch_command(args)

    use_config(config)
    _redirect(launch)
    sys.argv = ["trl", "grpo", *arguments]
    from trl.cli import main

    code = main()
    if code:
        sys.exit(code)


def use_config(config: type) -> None:
    """Let TRL's script for GRPO parse another config, for the rest of the process."""
    modules: list[Any] = [trl, sys.modules["trl.trainer"], sys.modules.get("trl.scripts.grpo")]
    for module in modules:
        # TRL < 1.4: the script imports the name with its first line, later ones where they parse
        if hasattr(module, "GRPOConfig"):
            module.GRPOConfig = config


def launch_options() -> set[str]:
    """The names in a YAML file that `trl grpo` hands on to `accelerate launch`, where its script has no such option."""
    strings = [string for action in launch_command_parser()._actions for string in action.option_strings]
    return {string.lstrip("-").replace("-", "_") for string in strings} | {"accelerate_config", "env"}


def script_classes(config: type) -> tuple[Any, ...]:
    """What TRL's script for GRPO parses, with another config."""
    from trl.scripts.grpo import GRPOScriptArguments

    return GRPOScriptArguments, config, trl.ModelConfig, trl.DatasetMixtureConfig


def option_names(config: type) -> set[str]:
    """The names of the options of TRL's script for GRPO, with another config."""
    return {option.name for cls in script_classes(config) for option in fields(cls)}


def _redirect(launch: Callable[[argparse.Namespace], None]) -> None:
    """Have TRL's command line start processes through `launch`, which takes the arguments of `accelerate launch`."""
    import trl.cli as cli

    if hasattr(cli, "launch_command"):  # TRL < 0.29: one module
        cli.launch_command = launch
        return
    try:
        from trl.cli.accelerate_launcher import launch_training_script

        defaults: Any = launch_training_script.__kwdefaults__
        defaults["launch_command_fn"] = launch
    except (ImportError, TypeError) as error:
        raise ImportError(
            f"trl-fused-grpo grpo cannot redirect the command line of TRL {TRL}: use `trl-fused-grpo run` with a "
            "script of yours."
        ) from error
