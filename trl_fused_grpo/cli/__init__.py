"""
The `trl-fused-grpo` command, with a module for each of its commands:

- `parity` compares the fused trainer with stock TRL.
"""

import typer

from . import parity


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """A faster GRPOTrainer for TRL that trains exactly what TRL trains."""


app.command()(parity.parity)
