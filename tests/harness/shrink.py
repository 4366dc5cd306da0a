"""Takes from a case that fails what it fails without."""

import math
import time
from collections.abc import Iterator
from typing import Any

from trl_fused_grpo.parity.judge import Result
from trl_fused_grpo.parity.trainers import Settings

from .compare import compare
from .random_cases import Options, case_of, name_of


def shrink(options: Options, found: Result, settings: Settings, until: float = math.inf) -> tuple[Options, Result]:
    """
    Remove options, one after the other, as long as the case fails in the same manner.

    Args:
        options (`dict[str, Any]`):
            Of a case whose verdict is `"different"` or `"failed"`.
        found ([`Result`]):
            Its result.
        settings ([`Settings`]):
            Device and dtype.
        until (`float`):
            Time of `time.monotonic` after which no other case is tried.

    Returns:
        `tuple[dict, Result]`:
            Options of which each is needed for the failure, unless time was over before, and its result.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(options):
            if time.monotonic() > until:
                return options, found
            result = compare(case_of(name_of(smaller), smaller), settings)
            if _manner(result) == _manner(found):
                options, found, is_smaller = smaller, result, True
                break
    return options, found


def _smaller(options: Options) -> Iterator[Options]:
    """With an option less, or with one number less in an option that has several; what matters least comes first."""
    for name in reversed(options):
        yield {other: value for other, value in options.items() if other != name}
    for name, value in options.items():
        if isinstance(value, list) and len(value) > 1:
            yield from ({**options, name: [number]} for number in value)


def _manner(result: Result) -> tuple[str, Any]:
    """The verdict, and the kind of exception if there is one."""
    return result.verdict, result.reason.split(":")[0] if result.verdict == "failed" else None
