"""`trl-fused-grpo grpo` is `trl grpo` with the fused trainer and its options."""

import typer

from trl_fused_grpo import FusedGRPOConfig
from trl_fused_grpo._compat.trl_cli import run_grpo_command


def grpo(context: typer.Context) -> None:
    """
    `trl grpo` with the fused loss: TRL's arguments and YAML files, and fused_* options among them.

    Processes are started through `accelerate launch`, with its options too, as `trl grpo` does.
    """
    run_grpo_command(context.args, FusedGRPOConfig, "trl_fused_grpo.cli.grpo_script")
