"""Cases in several processes, each with checkpoints of its own."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from .case import Case
from .comparison import Result, compare
from .trainers import Settings


_folder: tempfile.TemporaryDirectory[str] | None = None  # a worker's own


def results_of(
    cases: Sequence[Case], settings: Settings, jobs: int, prepare: Callable[[], None] | None = None
) -> Iterator[Result]:
    """
    Run cases and yield their results in order.

    Args:
        cases (`Sequence[Case]`):
            What to run, of one of the named sets.
        settings ([`Settings`]):
            Device and dtype.
        jobs (`int`):
            Processes; with 1 everything runs in this one.
        prepare (`Callable`, *optional*):
            Called once in each of several processes.
    """
    if jobs == 1:
        yield from (compare(case, settings) for case in cases)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (prepare,)) as pool:
        yield from pool.map(_compare, [case.name for case in cases], [settings] * len(cases))


def _prepare(prepare: Callable[[], None] | None) -> None:
    global _folder
    _folder = tempfile.TemporaryDirectory(prefix="trl-fused-grpo-")
    if prepare is not None:
        prepare()


def _compare(name: str, settings: Settings) -> Result:
    from . import CASES, CUSTOMISED_CASES, MODEL_CASES  # what customises a trainer cannot be sent

    assert _folder is not None, "see _prepare"
    case = next(case for case in (*CASES, *MODEL_CASES, *CUSTOMISED_CASES) if case.name == name)
    return compare(case, replace(settings, folder=Path(_folder.name)))
