"""TRL's command line, which differs between releases of TRL."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import trl
from accelerate.commands.launch import launch_command

from .required import TRL


def run_grpo_command(arguments: list[str], config: type, module: str) -> None:
    """
    Run `trl grpo` with other options and another script: TRL parses, and starts processes through `accelerate launch`.

    Args:
        arguments (`list[str]`): what follows `trl grpo`.
        config (`type`): the dataclass whose options TRL's parser knows in place of `GRPOConfig`'s.
        module (`str`): what each process runs in place of TRL's script.

    Raises:
        `ImportError`: when TRL's command line cannot be redirected.
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
