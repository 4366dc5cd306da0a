"""
The `trl-fused-grpo` command, with a module for each of its commands:

- `doctor` says which paths a training would take, and why not a faster one.
- `grpo` is `trl grpo` with the fused trainer; `grpo_script` is what its processes run.
- `parity` compares the fused trainer with stock TRL.
- `run` runs a script that nobody edits, with every `GRPOTrainer` and `RLOOTrainer` of it fused.
"""

import sys
from typing import Any

import typer

from . import doctor, grpo, parity, run


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def about() -> None:
    """A faster GRPOTrainer for TRL that trains exactly what TRL trains."""


# Their arguments are another parser's
_UNPARSED: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

app.command()(doctor.doctor)
app.command()(parity.parity)
app.command(context_settings=_UNPARSED)(grpo.grpo)
app.command(context_settings=_UNPARSED)(run.run)


def main() -> None:
    """What the command and `python -m trl_fused_grpo` call."""
    if sys.argv[1:2] == ["run"]:
        run.run_words(sys.argv[2:])  # typer would take some exceptions of a script for its own, and say nothing
    else:
        app(prog_name="trl-fused-grpo")
