"""`trl-fused-grpo parity` compares the fused trainer with stock TRL."""

import logging
import os
import tempfile
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


if TYPE_CHECKING:  # help needs nothing of torch
    from trl_fused_grpo.parity import Case, Result, Settings


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


# Options that `python -m tests.harness` has too
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to run.")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="float32 compares with stock; bfloat16 compares both with float64.")
]
JobsOption = Annotated[int, typer.Option("--jobs", min=1, help="Processes that share the cases.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure.")]


def parity(
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Run this case only; may be repeated.")
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="The cases of model families and kinds of output projection instead.")
    ] = False,
    issue_1082: Annotated[
        bool,
        typer.Option(
            "--issue-1082",
            help="What TRL's Liger loss (TRL <= 1.13) leaves out, by Liger-Kernel's issue 1082, instead.",
        ),
    ] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    jobs: JobsOption = 1,
    json_file: JsonOption = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the errors.")] = None,
) -> None:
    """
    Compare FusedGRPOTrainer with stock TRL: loss, every parameter's gradient, every metric.

    Both get the same weights and batches, as does stock TRL's Liger loss where the installed TRL has one. Exits with 1
    when anything is out of tolerance.
    """
    check_folders(json_file, plot_file)
    if plot_file and not find_spec("matplotlib"):
        raise typer.BadParameter("--plot needs matplotlib: pip install 'trl-fused-grpo[plot]'.")
    if models and issue_1082:
        raise typer.BadParameter("--models and --issue-1082 are sets of cases: choose one.")
    from trl_fused_grpo.parity import CASES, ISSUE_1082_CASES, MODEL_CASES, report
    from trl_fused_grpo.parity.compare import run_cases

    cases = MODEL_CASES if models else ISSUE_1082_CASES if issue_1082 else CASES
    selected, console = select(cases, case or []), make_console()
    if list_cases:
        print_cases(selected, console)
        return
    with comparing(device, dtype) as settings:
        results = collect(run_cases(selected, settings, jobs, silence), [case.name for case in selected], console)
        if issue_1082:
            report.print_issue_1082(results, settings, console)
        else:
            report.print_report(results, settings, console, layouts=models)
        if json_file:
            report.write_json(results, settings, json_file)
        if plot_file and not report.write_plot(results, settings, plot_file):
            console.print(f"There is no error to draw: {plot_file} was not written.")
    raise typer.Exit(0 if report.passed(results) else 1)


def check_folders(*files: Path | None) -> None:
    """Refuse files in folders that do not exist."""
    for path in filter(None, files):
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {path} does not exist.")


def select(cases: "Sequence[Case]", names: Sequence[str]) -> "list[Case]":
    """Return the cases of these names, once each, or all. An unknown name is refused, with those that are near."""
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            near = " or ".join(get_close_matches(name, known))
            advice = f"did you mean {near}?" if near else "--list names the known ones."
            raise typer.BadParameter(f"unknown case {name}: {advice}")
    return [known[name] for name in dict.fromkeys(names)] or list(cases)


def print_cases(cases: "Sequence[Case]", console: Console) -> None:
    """Print names and descriptions."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        console.print(f"[bold]{case.name:{width}}[/]", case.description, markup=True, highlight=False)


@contextmanager
def comparing(device: Device, dtype: Dtype) -> "Generator[Settings, None, None]":
    """Within the context TRL is stock, its warnings are off, and checkpoints have a folder."""
    import torch

    from trl_fused_grpo.parity import Settings
    from trl_fused_grpo.patching import unpatched

    place = _device_of(device)
    with unpatched(), _quiet(), tempfile.TemporaryDirectory(prefix="trl-fused-grpo-") as folder:
        yield Settings(Path(folder), place, getattr(torch, dtype.value))


def collect(results: "Iterable[Result]", names: Sequence[str], console: Console) -> "list[Result]":
    """Return results in the order of the names, in whichever they come, and show a progress bar meanwhile."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    places, collected = {name: place for place, name in enumerate(names)}, []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(names))
        for result in results:
            collected.append(result)
            progress.update(task, description=result.name, advance=1)
    return sorted(collected, key=lambda result: places[result.name])


def make_console() -> Console:
    """Return where to print. A log has no width, and the table does not fit into 80 columns."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    return console


def _device_of(device: Device) -> str:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda, but torch sees no CUDA device.")
    return "cuda" if device is not Device.cpu and torch.cuda.is_available() else "cpu"


def silence() -> None:
    """Turn warnings and progress bars off: those of dozens of trainers would hide the table."""
    from transformers.utils import logging as transformers_logging

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """While it lasts, there are no warnings and progress bars."""
    from transformers.utils import logging as transformers_logging

    bars, disabled = transformers_logging.is_progress_bar_enabled(), logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            silence()
            yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()
