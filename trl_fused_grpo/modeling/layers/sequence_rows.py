"""Rows of their own for the sequences of a packed row, which begin at column zero."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


# What one more column of rows costs, in tokens, and one more group of rows: a torch implementation of a state walks
# along the columns in a loop, and every group begins the loop anew
COLUMN_COST, GROUP_COST = 8, 2048
MOST_PARTS = 48  # more sequences than these are grouped a few at a time: finding the best groups takes the square


class SequenceRows:
    """Rows of their own for the sequences of a packed row, in groups of similar length."""

    def __init__(self, lengths: Sequence[int], device: torch.device, most_groups: int | None = None):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        indices, places, self.count = [], torch.empty(int(starts[-1]), dtype=torch.long), 0
        for group in length_groups(lengths, most_groups):
            width = max(lengths[i] for i in group)
            columns = torch.arange(width)
            of_group = torch.tensor([lengths[i] for i in group]).unsqueeze(1)  # [n, 1]
            index = starts[group].unsqueeze(1) + columns.minimum(of_group - 1)  # [n, W]
            is_token = columns < of_group
            places[index[is_token]] = self.count + is_token.flatten().nonzero().squeeze(1)
            self.count += index.numel()
            indices.append(index.to(device, non_blocking=True))
        self.indices, self.places = indices, places.to(device, non_blocking=True)

    def unpack(self, value: Any) -> list[Any]:
        """An argument of the layer for each group: tensors `[1, S, ...]` as rows `[n, W, ...]`, others as they are."""
        if isinstance(value, Tensor) and value.shape[:2] == (1, len(self.places)):
            return list(_Unpack.apply(value, self))
        if type(value) in (tuple, list):
            parts = [self.unpack(part) for part in value]
            return [type(value)(part[group] for part in parts) for group in range(self.groups)]
        return [value] * self.groups

    @property
    def groups(self) -> int:
        return len(self.indices)

    def pack(self, results: list[Any]) -> Any:
        """Put the layer's outputs for all groups back into one packed row: tensors `[1, S, ...]`."""
        first = results[0]
        if isinstance(first, Tensor) and first.shape[:2] == self.indices[0].shape:
            return _Pack.apply(self, *results)
        if type(first) in (tuple, list):
            return type(first)(map(self.pack, map(list, zip(*results, strict=True))))
        return first


class _Unpack(torch.autograd.Function):
    """Rows of each group from a packed row; what stands behind a sequence gets no gradient."""

    @staticmethod
    def forward(ctx, packed: Tensor, rows: SequenceRows) -> tuple[Tensor, ...]:
        ctx.rows = rows
        return tuple(packed[0][index] for index in rows.indices)

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor, None]:
        flat = torch.cat([grad.flatten(0, 1) for grad in grads])
        return flat.index_select(0, ctx.rows.places).unsqueeze(0), None


class _Pack(torch.autograd.Function):
    """The packed row from the rows of each group."""

    @staticmethod
    def forward(ctx, rows: SequenceRows, *results: Tensor) -> Tensor:
        ctx.rows = rows
        return torch.cat([result.flatten(0, 1) for result in results]).index_select(0, rows.places).unsqueeze(0)

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, grad = ctx.rows, grads[0][0]
        flat = grad.new_zeros(rows.count, *grad.shape[1:]).index_copy_(0, rows.places, grad)
        parts = flat.split([index.numel() for index in rows.indices])
        return None, *(part.unflatten(0, index.shape) for part, index in zip(parts, rows.indices, strict=True))


def length_groups(lengths: Sequence[int], most: int | None = None) -> list[list[int]]:
    """
    Partition sequences into groups of similar length, so that rows as long as the longest of each cost least.

    Returns:
        `list[list[int]]`: indices of each group, the longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if most == 1:
        return [order]
    step = -(-len(order) // MOST_PARTS)
    parts = [order[start : start + step] for start in range(0, len(order), step)]
    # The least cost of the first `end` parts, and where their last group begins
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(parts) + 1):
        costs = []
        for begin in range(end):
            rows = sum(map(len, parts[begin:end]))
            costs.append((best[begin][0] + lengths[parts[begin][0]] * (rows + COLUMN_COST) + GROUP_COST, begin))
        best.append(min(costs))
    groups: list[list[int]] = []
    end = len(parts)
    while end:
        begin = best[end][1]
        groups.insert(0, [i for part in parts[begin:end] for i in part])
        end = begin
    return groups
