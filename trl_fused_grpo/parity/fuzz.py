"""Runs cases drawn at random, shrinks those that fail, and prints what came out."""

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.markup import escape

from . import report
from .jobs import run_cases
from .random_cases import PREFIX, TRAINING, name_of, options_of, random_case
from .result import Result
from .shrink import shrink
from .trainers import Settings


FAILURES = ("different", "failed")
MOST_SHRUNK = 20  # a fault fails many cases
MINUTES_TO_SHRINK = 10  # of all cases that failed: in bfloat16 one that fails by little takes hundreds of batches
MOST_REASONS = 12  # for which cases were skipped


def fuzz(
    count: int,
    seed: int,
    settings: Settings,
    jobs: int,
    minutes: float | None,
    prepare: Callable[[], None] | None,
    trainings: bool = False,
) -> Iterator[Result]:
    """
    Run cases, begun in the order in which they are drawn.

    Args:
        count (`int`):
            How many cases to draw.
        seed (`int`):
            From which they are drawn.
        settings ([`Settings`]):
            Device and dtype.
        jobs (`int`):
            Number of processes.
        minutes (`float`, *optional*):
            After which no other case begins.
        prepare (`Callable`, *optional*):
            Called once in each of several processes.
        trainings (`bool`):
            Whether whole trainings are drawn.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    prefix = f"{PREFIX}{TRAINING}:" if trainings else PREFIX
    cases = [random_case(f"{prefix}{seed}:{index}") for index in range(count)]
    return run_cases(cases, settings, jobs, prepare, until)


def print_failures(results: Sequence[Result], settings: Settings, console: Console) -> None:
    """Print a command for each of the first cases that failed, with the options that are needed for it."""
    failures = [result for result in results if result.verdict in FAILURES]
    until = time.monotonic() + 60 * MINUTES_TO_SHRINK
    for result in failures[:MOST_SHRUNK]:
        options, smallest = options_of(result.name), result
        if not result.is_device_lost:  # it would be lost here too
            options, smallest = shrink(options, result, settings, until)
        console.print(f"[bold red]{result.name}[/], smallest: {escape(smallest.reason)}", highlight=False)
        console.print(f"  {command_of(name_of(options), settings)}", markup=False, highlight=False, soft_wrap=True)


def command_of(name: str, settings: Settings) -> str:
    """The command that runs one case again."""
    dtype = [] if settings.dtype == torch.float32 else ["--dtype", str(settings.dtype).removeprefix("torch.")]
    return shlex.join(["trl-fused-grpo", "parity", "--device", settings.device, *dtype, "--case", name])


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
