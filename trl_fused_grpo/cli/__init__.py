"""
The `trl-fused-grpo` command, with a module for each of its commands:

- `grpo` is `trl grpo` with the fused trainer; `grpo_script` is what its processes run.
- `parity` compares the fused trainer with stock TRL.
- `run` runs a script that nobody edits, with every `GRPOTrainer` of it fused.
"""

from typing import Any

import typer

from . import grpo, parity, run


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """A faster GRPOTrainer for TRL that trains exactly what TRL trains."""


# Their arguments are another parser's
_UNPARSED: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

app.command()(parity.parity)
app.command(context_settings=_UNPARSED)(grpo.grpo)
app.command(context_settings=_UNPARSED)(run.run)
