"""`python -m tests.harness`: the command."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from trl_fused_grpo.cli.parity import (
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    JobsOption,
    JsonOption,
    check_folders,
    collect,
    comparing,
    make_console,
    print_cases,
    select,
    silence,
)
from trl_fused_grpo.parity import Result, Settings, report

from .cases import CUSTOMISED_CASES
from .census import models
from .fuzz import drawn_names, print_failures, print_summary, run_named
from .random_cases import PREFIX, name_of, random_case


_OF_CENSUS = {"old": "far", "repeated_prompts": True}
WRITTEN_EVERY = 50  # cases of `--random`: a run of hours may be killed
app = typer.Typer(add_completion=False)


@app.command()
def harness(
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="NAME",
            help="Run this case only; may be repeated. random:SEED:INDEX is a drawn one, random:training:SEED:INDEX a "
            "drawn training.",
        ),
    ] = None,
    customised: Annotated[
        bool, typer.Option("--customised", help="Whole trainings with subclasses, patches, hooks and callbacks.")
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(
            "--random", min=1, metavar="N", help="So many cases drawn at random; with --customised whole trainings."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the cases that --random draws; 0 if left out.")] = None,
    census: Annotated[
        bool, typer.Option("--census", help="A step of each causal model of transformers that `parity --models` lacks.")
    ] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop --random after so long.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the customised cases and stop.")] = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    jobs: JobsOption = 1,
    json_file: JsonOption = None,
) -> None:
    """
    Compare FusedGRPOTrainer with stock TRL in whole trainings with what users change, and in cases drawn at random.

    Exits with 1 when anything is out of tolerance.
    """
    check_folders(json_file)
    if random is not None and (case or list_cases or census):
        raise typer.BadParameter("--random draws its cases: --case, --census and --list do not go with it.")
    if random is None and (seed is not None or minutes is not None):
        raise typer.BadParameter(
            "--seed and --minutes go with --random alone; a drawn case is named random:SEED:INDEX."
        )
    if not (customised or case or random or census or list_cases):
        raise typer.BadParameter("choose --customised, --random, --census or --case.")
    if list_cases:
        print_cases(CUSTOMISED_CASES, make_console())
        return
    is_drawn = random is not None
    if census:
        case = [*(case or ()), *(name_of({"model": model, **_OF_CENSUS}) for model in models())]
    names = drawn_names(random, seed or 0, customised) if is_drawn else _names(case or [])
    console = make_console()
    with comparing(device, dtype) as settings:
        results = run_named(names, settings, jobs, silence, minutes)
        results = collect(_written(results, settings, json_file), names, console)
        if is_drawn:
            print_summary(results, len(names), settings, console)
        else:
            measured = "gradient" if all(name.startswith(PREFIX) for name in names) else "update"
            report.print_report(results, settings, console, layouts=True, measured=measured)
        if json_file:
            report.write_json(results, settings, json_file)
        if is_drawn:
            print_failures(results, settings, console)
    raise typer.Exit(0 if report.passed(results) else 1)


def _names(given: list[str]) -> list[str]:
    """Those that were given, once each, or all of customised cases."""
    drawn = [name for name in dict.fromkeys(given) if name.startswith(PREFIX)]
    try:
        for name in drawn:
            random_case(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    named = [name for name in given if name not in drawn]
    return [*drawn, *(case.name for case in select(CUSTOMISED_CASES, named) if named or not drawn)]


def _written(results: Iterable[Result], settings: Settings, path: Path | None) -> Iterator[Result]:
    """The results as they come; what there is so far is written to a file."""
    done: list[Result] = []
    for result in results:
        yield result
        done.append(result)
        if path and len(done) % WRITTEN_EVERY == 0:
            report.write_json(done, settings, path)
