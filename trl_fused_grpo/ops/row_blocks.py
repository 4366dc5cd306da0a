"""
In which order the rows go through the head, and how many at a time.

Without groups a block is a chunk of rows. A group's gradients are known when the log-probabilities of all of its rows
are. So a block holds whole groups, and the logits of all of its rows exist together. A longer group, whose rows receive
the same gradient, is a block whose gradients are built chunk by chunk and multiplied at the end; this takes a second
gradient of the head. What neither memory allows is computed a second time in backward.
"""

from dataclasses import dataclass
from typing import Literal

from .chunk_size import rows_per_chunk
from .chunked_linear import split_range
from .forecast import RowGroups


# Larger blocks of several groups gain little (`benchmarks/NOTES.md`, chunks of logits)
_MOST_PACKED_ROWS = 4096


@dataclass(frozen=True)
class RowBlock:
    """Rows whose gradients are assumed together."""

    rows: slice
    parts: list[slice]  # the same rows; the logits of one part exist at a time
    assumes: Literal["none", "forecast", "equal"]


@dataclass(frozen=True)
class RowLimits:
    """How many rows of logits fit into which memory."""

    chunk: int  # into that of a chunk
    packed: int  # at most for several groups together
    group: int  # into that of one group
    head_grad: int  # into that of a gradient of the head, rounded up

    @classmethod
    def of(
        cls, vocab_size: int, itemsize: int, logits_mib: float, group_mib: float | None, head_grad_bytes: int
    ) -> "RowLimits":
        """The limits for logits of `itemsize` bytes; without `group_mib` a group may take what a chunk may."""
        chunk = rows_per_chunk(vocab_size, itemsize, logits_mib)
        row_bytes = vocab_size * itemsize
        head_grad = -(-head_grad_bytes // row_bytes)
        if group_mib is None:
            return cls(chunk, chunk, chunk, head_grad)
        packed = min(rows_per_chunk(vocab_size, itemsize, group_mib), _MOST_PACKED_ROWS)
        group = int(group_mib * 2**20) // row_bytes
        return cls(chunk, max(chunk, packed), max(chunk, group), head_grad)


def plan_blocks(rows: int, grad_rows: int, groups: RowGroups | None, limits: RowLimits) -> list[RowBlock]:
    """Partition rows into blocks."""
    without = [RowBlock(part, [part], "none") for part in split_range(grad_rows, rows, limits.chunk)]
    if groups is None:
        return [RowBlock(part, [part], "forecast") for part in split_range(0, grad_rows, limits.chunk)] + without
    equal, whole, left = [], list[tuple[int, int]](), []
    most_at_once = max(limits.packed, min(limits.group, limits.head_grad)) if groups.have_equal_grads else limits.group
    start = 0
    for end in groups.ends:
        size, parts = end - start, list(split_range(start, end, limits.chunk))
        if size <= most_at_once:
            whole.append((start, end))
        # The first needs no memory of its own: nothing else is in the gradient of the head yet
        elif groups.have_equal_grads and (not equal or limits.head_grad <= limits.group):
            equal.append(RowBlock(slice(start, end), parts, "equal"))
        else:
            left.append(RowBlock(slice(start, end), parts, "none"))
        start = end
    return equal + _blocks_of_whole(whole, limits.packed) + left + without


def rows_without_assumption(blocks: list[RowBlock], grad_rows: int) -> int:
    """How many of the rows that are expected to receive a gradient are in blocks for which none is assumed."""
    left = [block.rows for block in blocks if block.assumes == "none" and block.rows.start < grad_rows]
    return sum(rows.stop - rows.start for rows in left)


def _blocks_of_whole(groups: list[tuple[int, int]], most: int) -> list[RowBlock]:
    """
    Blocks of groups, joined to at most `most` rows where they follow one another. The largest comes first: its buffer
    of logits then serves all.
    """
    joined: list[tuple[int, int]] = []
    for start, end in groups:
        if joined and joined[-1][1] == start and end - joined[-1][0] <= most:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    slices = [slice(*bounds) for bounds in sorted(joined, key=lambda bounds: bounds[0] - bounds[1])]
    return [RowBlock(rows, [rows], "forecast") for rows in slices if rows.stop > rows.start]
