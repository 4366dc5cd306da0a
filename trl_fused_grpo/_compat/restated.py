"""
What of TRL's is restated in this package: vLLM's importance ratio, which may come from the training forward, and the
objective, whose gradients are forecast. It is right for the releases whose source is known here.
"""

import functools
import hashlib
import inspect
import textwrap
from typing import Any

from .required import NEWEST_TRL, OLDEST_TRL, TRL
from .trainers import trl_class
from .trl import OBJECTIVE_METHODS


# What [`source_digest`] is for `GRPOTrainer` and `RLOOTrainer`, and the first release of TRL that has it
_KNOWN = frozenset(
    [
        *("df93ad32a5fce692", "57f209d496e8b3d5"),  # 0.27.2
        *("b6f4389a96d05934",),  # 0.28.0
        *("a2e44955f36cba0c", "f915f596375a1853"),  # 0.29.0
        *("d71f7d7d8a6313b9", "c7b5260ae064d591"),  # 0.29.1
        *("b3ba8ae4690c1d95", "4df4791b33eccc01"),  # 1.0.0
        *("ac43bd8138b53fd4", "3ebc7464cad81b78"),  # 1.1.0
        *("3a8614db0d4728d5",),  # 1.2.0
        *("3d1d966cb477b49e", "9f869b9880a013d6"),  # 1.3.0
        *("86d995e8973abb48", "18e70a4818559b75"),  # 1.6.0
        *("f95879a94cdad17f", "e4703298f047c2e2"),  # 1.7.0
        *("b968da283a664bd7",),  # 1.8.0
        *("549c94f1548a4501", "ff5adc38a24dbd2a"),  # 1.9.0
        *("00c8a953dd19a8b3",),  # 1.9.1
        *("b75a0ee763493344",),  # 1.10.0
        *("f430578c01b95f91", "3ca351117ec08fe9"),  # 1.11.0
        *("a68ca1bdd8864630",),  # 1.13.0
        *("55cfda501beda3d6", "a3d756cb9edb1849"),  # 1.14.0
        *("22e6d4e730dc3dd9", "94a88ff90657c3e3"),  # 1.14.2
        *("815178e8ea72edd4", "42a0a5f3e5fe58c6"),  # 1.15.0
    ]
)


def unknown_source(trainer: Any) -> str | None:
    """The part of TRL's own source that is not known, in words, or `None`."""
    cls: Any = trl_class(type(trainer))
    if source_digest(cls, cls._compute_loss, cls._generate_and_score_completions) in _KNOWN:
        return None
    return f"the loss of {cls.__name__} in TRL {TRL} is none of those that were tested ({OLDEST_TRL} to {NEWEST_TRL})"


@functools.lru_cache(maxsize=8)
def source_digest(cls: Any, *functions: Any) -> str:
    """A number for the source of some methods of a trainer of TRL and of those that its objective calls."""
    called = [getattr(cls, name) for name in OBJECTIVE_METHODS if hasattr(cls, name)]
    return hashlib.sha256("\n".join(map(_source, (*functions, *called))).encode()).hexdigest()[:16]


def _source(function: Any) -> str:
    """The source of a function from its `def` on; without, as of code that was typed in, its name."""
    function = inspect.unwrap(function)
    try:
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    except (OSError, TypeError):
        return repr(function)
    first = next(number for number, line in enumerate(lines) if line.startswith("def "))
    return "\n".join(line.rstrip() for line in lines[first:]).rstrip()
