"""
What kernels write beside their results: the same in the dtype of autocast, for those who cast a result. So it is read
from memory once less. Who casts is known from the call before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor


class _Offer(NamedTuple):
    """
    A result that may be cast.

    Args:
        result (`ref`): to the result.
        version (`int`): of it, when it was written.
        cast (`Tensor`, *optional*): the same in another dtype.
        writer ([`CastWriter`]): who wrote both.
    """

    result: ref
    version: int
    cast: Tensor | None
    writer: "CastWriter"


# By the `id` of a result, as long as it lives
_offers: dict[int, _Offer] = {}


class CastWriter:
    """A kernel that writes casts beside its results where those of its last call were asked for."""

    def __init__(self) -> None:
        self._dtype: torch.dtype | None = None
        self._is_asked_for = False

    def run(self, kernel: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
        """
        What a kernel returns for some tensors.

        Args:
            kernel (`Callable`):
                Of the tensors and a dtype, or `None`; returns results, as a tuple or alone, and their casts.
            tensors (`tuple`): its arguments.
        """
        if not self._is_asked_for:
            self._dtype = None
        device = tensors[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        results, casts = kernel(*tensors, self._dtype if self._dtype == dtype else None)
        self._is_asked_for = False
        if dtype is not None:
            each = results if isinstance(results, tuple) else (results,)
            for result, cast in zip(each, casts or (None,) * len(each), strict=True):
                self._offer(result, cast)
        return results

    def _offer(self, result: Tensor, cast: Tensor | None) -> None:
        if result.dtype != torch.float32 or result.is_inference():
            return
        number = id(result)
        _offers[number] = _Offer(ref(result, lambda _: _offers.pop(number, None)), result._version, cast, self)

    def ask_for(self, dtype: torch.dtype) -> None:
        """A result was cast to this dtype."""
        self._dtype, self._is_asked_for = dtype, True


def cast_of(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A tensor in another dtype, where a kernel has written it beside the tensor; without a graph."""
    offer = _offers.get(id(tensor))
    if offer is None or offer.result() is not tensor:
        return None
    offer.writer.ask_for(dtype)
    is_same = offer.version == tensor._version and offer.cast is not None and offer.cast.dtype == dtype
    return offer.cast if is_same else None
