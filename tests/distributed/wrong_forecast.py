"""A forecast that gets gradients wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from trl_fused_grpo.ops.forecast import groups_of
from trl_fused_grpo.training import requests


class _Rows:
    """Wrong for every other row."""

    def __init__(self, right: Any):
        self.right, self.grad_rows, self.groups = right, right.grad_rows, groups_of(right)

    def __call__(self, rows: slice, logps: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, Any]:
        grad, grad_entropies = self.right(rows, logps, entropies)
        odd = torch.arange(rows.start, rows.stop) % 2 == 1
        return torch.where(odd, 0.5 - 3 * grad, grad), grad_entropies


class _WrongForecast:
    def __init__(self, right: Any):
        self.right, self.needs_grad = right, right.needs_grad

    def at(self, index: torch.Tensor, grad_rows: int) -> _Rows:
        return _Rows(self.right.at(index, grad_rows))

    @classmethod
    def joined(cls, parts: list["_WrongForecast"]) -> "_WrongForecast":
        rights = [part.right for part in parts]
        return cls(type(rights[0]).joined(rights))


@contextmanager
def misled() -> Iterator[None]:
    """While it lasts, every forecast in this process is wrong."""
    right = requests.forecast

    def wrong(*args: Any, **kwargs: Any) -> _WrongForecast:
        return _WrongForecast(right(*args, **kwargs))

    with mock.patch.object(requests, "forecast", wrong):
        yield
