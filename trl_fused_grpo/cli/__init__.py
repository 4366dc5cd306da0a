"""
The `trl-fused-grpo` command, with a module for each of its commands. Only help of `grpo`, which is TRL's, needs torch.

- `doctor` says which paths a training would take, and why not a faster one.
- `grpo` is `trl grpo` with the fused trainer; `grpo_script` is what its processes run.
- `parity` compares the fused trainer with stock TRL.
- `run` runs a script that nobody edits, with every `GRPOTrainer` and `RLOOTrainer` of it fused.
- `words` tells which names were meant by mistyped ones.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from trl_fused_grpo import __version__

from . import parity


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"trl-fused-grpo {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A faster GRPOTrainer for TRL that trains exactly what TRL trains."""
    import_module("trl_fused_grpo._compat")  # refuses a TRL that is too old, before a command imports it


@app.command("doctor")
def _doctor(
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="A model: a folder, or a name on the Hub.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A configuration, as `trl grpo --config` reads it.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda", help="Describe a training there, also where there is no GPU."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """
    Say which paths a training would take, why not a faster one, and what to change.

    Without a model: what is installed. With one it is made from its configuration, without weights. Exits with 1 where
    the trainer would refuse, with its message, and with 2 where there is nothing to look at: no such model, no such
    option.
    """
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device}.")
    from .doctor import doctor

    raise typer.Exit(doctor(model, config, device, as_json))


# Their arguments are another parser's
_UNPARSED: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


@app.command("grpo", context_settings=_UNPARSED)
def _grpo(context: typer.Context) -> None:
    """
    `trl grpo` with the fused loss: TRL's arguments and YAML files, and fused_* options among them.

    Processes are started through `accelerate launch`, with its options too, as `trl grpo` does.
    """
    from .grpo import grpo

    grpo(context.args)


app.command("parity")(parity.parity)


@app.command("run", context_settings=_UNPARSED)
def _run(context: typer.Context) -> None:
    """
    Run a script of yours, unchanged, with the fused loss in all its trainers: run [OPTIONS] [-m] SCRIPT [ARGUMENTS].

    What follows the script is the script's. With several processes: accelerate launch -m trl_fused_grpo run SCRIPT.
    """
    from .run import run_words

    run_words(context.args)


def main() -> None:
    """What the command and `python -m trl_fused_grpo` call. Whatever is wrong with its words is said in one line."""
    if sys.argv[1:2] == ["run"]:
        from .run import run_words

        run_words(sys.argv[2:])  # typer would take some exceptions of a script for its own, and say nothing
        return
    try:
        sys.exit(app(prog_name="trl-fused-grpo", standalone_mode=False))
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        # typer's own, whose class depends on its version, and the refusal of an old TRL
        describe: Any = getattr(error, "format_message", None)
        if describe is None and not str(error).startswith("trl_fused_grpo cannot extend"):
            raise
        print(f"trl-fused-grpo: {describe() if describe else error}", file=sys.stderr)
        sys.exit(2)
