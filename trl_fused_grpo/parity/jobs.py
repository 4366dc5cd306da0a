"""Runs cases one after the other in this process, or in several processes that each have checkpoints of their own."""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from .case import Case
from .cases import CASES, CUSTOMISED_CASES, ISSUE_1082_CASES, MODEL_CASES
from .compare import compare
from .random_cases import random_case
from .result import Result
from .trainers import Settings


_folder: tempfile.TemporaryDirectory[str] | None = None  # a worker process's own


def run_cases(
    cases: Sequence[Case],
    settings: Settings,
    jobs: int,
    prepare: Callable[[], None] | None = None,
    until: float = math.inf,
) -> Generator[Result, None, None]:
    """
    Run cases and yield their results, with several processes in the order in which they end: a case that takes minutes
    does not withhold the others. None follows one that lost the device.

    Args:
        cases (`Sequence[Case]`):
            What to run. With several processes, cases of the named sets or drawn ones.
        settings ([`Settings`]):
            Device and dtype.
        jobs (`int`):
            Number of processes; with 1 everything runs in this one.
        prepare (`Callable`, *optional*):
            Called once in each of several processes.
        until (`float`, defaults to `math.inf`):
            No case begins later, by `time.monotonic()`, which processes share.
    """
    if jobs == 1:
        _freeze_imports()
        yield from _until_lost(compare(case, settings) for case in cases if time.monotonic() < until)
        return
    everything = _all_cases()
    # A process gets the place of a case: a customisation is made of nested functions, which cannot be pickled, and two
    # sets may each have a case of the same name. The name of a drawn case says what it is made of
    places = [
        case.name if case.drawn else next(i for i, known in enumerate(everything) if known is case) for case in cases
    ]
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (prepare,)) as pool:
        ended = as_completed([pool.submit(_compare, place, settings, until) for place in places])
        results = (future.result() for future in ended)
        try:
            yield from _until_lost(result for result in results if result is not None)
        finally:
            pool.shutdown(cancel_futures=True)


def _until_lost(results: Iterable[Result]) -> Generator[Result, None, None]:
    for result in results:
        yield result
        if result.is_device_lost:
            return


def _all_cases() -> tuple[Case, ...]:
    return (*CASES, *MODEL_CASES, *CUSTOMISED_CASES, *ISSUE_1082_CASES)


def _freeze_imports() -> None:
    """
    Leave what is imported out of garbage collection. Accelerate collects at the start of each training, and looking
    through torch and transformers takes more time than a small training.
    """
    gc.collect()
    gc.freeze()


def _prepare(prepare: Callable[[], None] | None) -> None:
    global _folder
    _freeze_imports()
    _folder = tempfile.TemporaryDirectory(prefix="trl-fused-grpo-")
    if prepare is not None:
        prepare()


def _compare(place: int | str, settings: Settings, until: float) -> Result | None:
    assert _folder is not None, "see _prepare"
    if time.monotonic() >= until:
        return None
    case = random_case(place) if isinstance(place, str) else _all_cases()[place]
    return compare(case, replace(settings, folder=Path(_folder.name)))
