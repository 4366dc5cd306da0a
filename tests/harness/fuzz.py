"""Runs customised and drawn cases, shrinks drawn ones that fail, and prints what came out."""

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.markup import escape

from trl_fused_grpo.parity import report
from trl_fused_grpo.parity.compare import run_cases
from trl_fused_grpo.parity.judge import Result
from trl_fused_grpo.parity.trainers import Settings

from .case import DrawnCase, Training
from .cases import CUSTOMISED_CASES
from .compare import compare, is_device_lost
from .random_cases import PREFIX, TRAINING, name_of, options_of, random_case
from .shrink import shrink


FAILURES = ("different", "failed")
MOST_SHRUNK = 20  # a fault fails many cases
MINUTES_TO_SHRINK = 10  # of all cases that failed: in bfloat16 one that fails by little takes hundreds of batches
MOST_REASONS = 12  # for which cases were skipped


def drawn_names(count: int, seed: int, trainings: bool) -> list[str]:
    """The names of the first cases, or whole trainings, that are drawn from a seed."""
    prefix = f"{PREFIX}{TRAINING}:" if trainings else PREFIX
    return [f"{prefix}{seed}:{index}" for index in range(count)]


def run_named(
    names: Sequence[str],
    settings: Settings,
    jobs: int,
    prepare: Callable[[], None] | None = None,
    minutes: float | None = None,
) -> Iterator[Result]:
    """
    Run cases, see [`run_cases`]. None follows one that lost the device.

    Args:
        names (`Sequence[str]`):
            Of customised or drawn cases: what users change is made of nested functions, which no process can send.
        settings, jobs, prepare: see [`run_cases`].
        minutes (`float`, *optional*):
            After which no other case begins.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for result in run_cases(names, settings, jobs, prepare, partial(_compare_until, until=until)):
        if result is not None:
            yield result
            if is_device_lost(result):
                return


def _compare_until(name: str, settings: Settings, until: float) -> Result | None:
    """`until` is a time of `time.monotonic()`, which processes share."""
    return compare(case_named(name), settings) if time.monotonic() < until else None


def case_named(name: str) -> DrawnCase | Training:
    """A customised case, or the drawn one that a name means."""
    return random_case(name) if name.startswith(PREFIX) else _CUSTOMISED[name]


_CUSTOMISED = {case.name: case for case in CUSTOMISED_CASES}


def print_failures(results: Sequence[Result], settings: Settings, console: Console) -> None:
    """Print a command for each of the first cases that failed, with the options that are needed for it."""
    failures = [result for result in results if result.verdict in FAILURES]
    until = time.monotonic() + 60 * MINUTES_TO_SHRINK
    for result in failures[:MOST_SHRUNK]:
        options, smallest = options_of(result.name), result
        if not is_device_lost(result):  # it would be lost here too
            options, smallest = shrink(options, result, settings, until)
        console.print(f"[bold red]{result.name}[/], smallest: {escape(smallest.reason)}", highlight=False)
        console.print(f"  {command_of(name_of(options), settings)}", markup=False, highlight=False, soft_wrap=True)


def command_of(name: str, settings: Settings) -> str:
    """The command that runs one case again."""
    dtype = [] if settings.dtype == torch.float32 else ["--dtype", str(settings.dtype).removeprefix("torch.")]
    return shlex.join(["python", "-m", "tests.harness", "--device", settings.device, *dtype, "--case", name])


def print_summary(results: Sequence[Result], drawn: int, settings: Settings, console: Console) -> None:
    """Print versions, how many cases had which verdict, why some were skipped, and by name what is not equal."""
    console.print(" · ".join(f"{name} {value}" for name, value in report.environment(settings).items()))
    for verdict in ("tie", "rounding", *FAILURES):
        color = "bold red" if verdict in FAILURES else "yellow"
        for result in results:
            if result.verdict == verdict:
                console.print(f"[{color}]{verdict}[/] {result.name}: {escape(result.reason)}", highlight=False)
    reasons = Counter(_kind(result.reason) for result in results if result.verdict == "skipped")
    for reason, count in reasons.most_common(MOST_REASONS):
        console.print(f"[dim]{count} skipped: {escape(reason)}[/]", highlight=False)
    of_all = "" if len(results) == drawn else f" of {drawn}"
    console.print(f"{len(results)} cases{of_all} drawn: {report.counts_of(results)}")


def _kind(reason: str) -> str:
    return reason if len(reason) <= 100 else f"{reason[:100]}…"
