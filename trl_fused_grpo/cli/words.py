"""Command lines that are wrong: one line, with the nearest name that there is."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn


def refuse(command: str, message: str) -> NoReturn:
    """End the process with 2, as wrong command lines do, and one line."""
    print(f"trl-fused-grpo {command}: {message}", file=sys.stderr)
    sys.exit(2)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Say that there is no option of a name, and which one may be meant."""
    nearest = get_close_matches(name, known, 1)
    return f"there is no option {name}" + (f"; did you mean {nearest[0]}?" if nearest else ".")


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        problem, _, words = message.partition(": ")
        if problem == "unrecognized arguments":
            message = unknown_name(words.split()[0], self._option_string_actions)
        refuse(self.prog.rpartition(" ")[2], message)
