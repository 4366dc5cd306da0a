"""`trl-fused-grpo parity` compares the fused trainer with stock TRL."""

import atexit
import logging
import os
import tempfile
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

from trl_fused_grpo.parity import (
    CASES,
    CUSTOMISED_CASES,
    ISSUE_1082_CASES,
    MODEL_CASES,
    Case,
    Settings,
    report,
)
from trl_fused_grpo.parity.fuzz import fuzz, print_failures, print_summary
from trl_fused_grpo.parity.jobs import run_cases
from trl_fused_grpo.parity.random_cases import PREFIX, random_case
from trl_fused_grpo.patching import unpatched


_UNTIL_THE_END = ExitStack()  # of a process of `--jobs`: a context that nobody keeps ends at once
WRITTEN_EVERY = 50  # cases of `--random`: a run of hours may be killed


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def parity(
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="NAME",
            help="Run this case only; may be repeated. random:SEED:INDEX is a drawn one, random:training:SEED:INDEX a "
            "drawn training.",
        ),
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="The cases of model families and kinds of output projection instead.")
    ] = False,
    customised: Annotated[
        bool,
        typer.Option("--customised", help="Whole trainings with subclasses, patches, hooks and callbacks instead."),
    ] = False,
    issue_1082: Annotated[
        bool,
        typer.Option(
            "--issue-1082",
            help="What TRL's Liger loss (TRL <= 1.13) leaves out, by Liger-Kernel's issue 1082, instead.",
        ),
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(
            "--random",
            min=1,
            metavar="N",
            help="So many cases drawn at random instead; with --customised whole trainings.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the cases that --random draws.")] = 0,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop --random after so long.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.auto,
    dtype: Annotated[
        Dtype, typer.Option(help="float32 compares with stock; bfloat16 compares both with float64.")
    ] = Dtype.float32,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the cases.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the errors.")] = None,
) -> None:
    """
    Compare FusedGRPOTrainer with stock TRL: loss, every parameter's gradient or change, every metric.

    Both get the same weights and batches, as does stock TRL's Liger loss where the installed TRL has one. Exits with 1
    when anything is out of tolerance.
    """
    _check_files(json_file, plot_file)
    if models + customised + issue_1082 > 1 or (random is not None and (models or issue_1082)):
        raise typer.BadParameter(
            "--models, --customised, --issue-1082 and --random are sets of cases: choose one. --random goes with "
            "--customised alone, and draws whole trainings then."
        )
    if random is not None and (case or list_cases or plot_file):
        raise typer.BadParameter("--random draws its cases: --case, --list and --plot do not go with it.")
    cases = MODEL_CASES if models else CUSTOMISED_CASES if customised else CASES
    if issue_1082:
        cases = ISSUE_1082_CASES
    with unpatched(), _quiet():
        if random is not None:
            raise typer.Exit(_run_random(random, customised, seed, minutes, device, dtype, jobs, json_file))
        code = _run_parity(cases, case or [], list_cases, device, dtype, jobs, json_file, plot_file)
    raise typer.Exit(code)


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    for path in filter(None, (json_file, plot_file)):
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {path} does not exist.")
    if plot_file and not find_spec("matplotlib"):
        raise typer.BadParameter("--plot needs matplotlib: pip install 'trl-fused-grpo[plot]'.")


def _run_parity(
    cases: tuple[Case, ...],
    names: list[str],
    list_cases: bool,
    device: Device,
    dtype: Dtype,
    jobs: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    console = _console()
    known = {case.name: case for case in cases}
    try:
        known |= {name: random_case(name) for name in names if name.startswith(PREFIX)}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown case {', '.join(unknown)}. Known cases: {', '.join(known)}.")
    if list_cases:
        width = max(len(case.name) for case in cases)
        for case in cases:
            console.print(f"[bold]{case.name:{width}}[/]", case.description, markup=True, highlight=False)
        return 0
    selected = [known[name] for name in dict.fromkeys(names)] or list(cases)
    with tempfile.TemporaryDirectory(prefix="trl-fused-grpo-") as folder:
        settings = Settings(Path(folder), _device_of(device), getattr(torch, dtype.value))
        with _progress(console) as progress:
            task = progress.add_task("", total=len(selected))
            results = []
            for result in run_cases(selected, settings, jobs, _silence):
                results.append(result)
                progress.update(task, description=result.name, advance=1)
    places = {case.name: place for place, case in enumerate(selected)}
    results.sort(key=lambda result: places[result.name])
    if cases is ISSUE_1082_CASES:
        report.print_issue_1082(results, settings, console)
    else:
        report.print_report(results, settings, console, cases is not CASES, trainings=cases is CUSTOMISED_CASES)
    if json_file:
        report.write_json(results, settings, json_file)
    if plot_file:
        report.write_plot(results, settings, plot_file)
    return 0 if report.passed(results) else 1


def _run_random(
    count: int,
    trainings: bool,
    seed: int,
    minutes: float | None,
    device: Device,
    dtype: Dtype,
    jobs: int,
    json_file: Path | None,
) -> int:
    console = _console()
    with tempfile.TemporaryDirectory(prefix="trl-fused-grpo-") as folder:
        settings = Settings(Path(folder), _device_of(device), getattr(torch, dtype.value))
        with _progress(console) as progress:
            task = progress.add_task("", total=count)
            results = []
            for result in fuzz(count, seed, settings, jobs, minutes, _silence, trainings):
                results.append(result)
                progress.update(task, description=result.name, advance=1)
                if json_file and len(results) % WRITTEN_EVERY == 0:
                    report.write_json(results, settings, json_file)
        results.sort(key=lambda result: (len(result.name), result.name))  # random:<seed>:<index>, so by index
        print_summary(results, count, settings, console)
        if json_file:
            report.write_json(results, settings, json_file)
        print_failures(results, settings, console)
    return 0 if report.passed(results) else 1


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 140  # a log has no width of its own, and the table does not fit into 80 columns
    return console


def _device_of(device: Device) -> str:
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda, but torch sees no CUDA device.")
    return "cuda" if device is not Device.cpu and torch.cuda.is_available() else "cpu"


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _silence() -> None:
    """Turns warnings, progress bars and patches off in a process of `--jobs`, until it ends."""
    _UNTIL_THE_END.enter_context(unpatched())
    _UNTIL_THE_END.enter_context(_quiet())
    atexit.register(_UNTIL_THE_END.close)  # while there are modules to import


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without warnings and progress bars: those of dozens of trainers would hide the table."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in ("trl", "trl_fused_grpo")]
    levels = [logger.level for logger in loggers]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
