"""Runs cases one after the other in this process, or in several processes that each have checkpoints of their own."""

import gc
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .compare import compare
from .trainers import Settings


_folder: tempfile.TemporaryDirectory[str] | None = None  # a worker process's own


def run_cases(
    cases: Sequence[Any],
    settings: Settings,
    jobs: int,
    prepare: Callable[[], None] | None = None,
    compare: Callable[[Any, Settings], Any] = compare,
) -> Generator[Any, None, None]:
    """
    Run cases and yield their results, with several processes in the order in which they end: a case that takes minutes
    does not withhold the others.

    Args:
        cases (`Sequence[Case]`): what to run.
        settings ([`Settings`]): device and dtype.
        jobs (`int`): number of processes; with 1 everything runs in this one.
        prepare (`Callable`, *optional*): called once in each of several processes.
        compare (`Callable`): takes a case and the settings, and returns the result.
    """
    if jobs == 1:
        _freeze_imports()
        yield from (compare(case, settings) for case in cases)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (prepare,)) as pool:
        ended = as_completed([pool.submit(_compare, compare, case, settings) for case in cases])
        try:
            yield from (future.result() for future in ended)
        finally:
            pool.shutdown(cancel_futures=True)


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


def _compare(compare: Callable[[Any, Settings], Any], case: Any, settings: Settings) -> Any:
    assert _folder is not None, "see _prepare"
    return compare(case, replace(settings, folder=Path(_folder.name)))
