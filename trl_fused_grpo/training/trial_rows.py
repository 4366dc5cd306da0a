"""Which sequences of its first batch a model is tried on, and in which columns."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trl_fused_grpo.modeling.layout import Rows

from .logps_request import LogpsArgs
from .partitioning import prompt_group_ids


ROWS_TRIED = 5
# Attention to padding takes the square of them, and float32 has no fast kernel: 16,593 took 20 s of a first step
_MOST_COLUMNS = 4096


def few_sequences(call: LogpsArgs, selected: Tensor, among: Sequence[int] = ()) -> list[int]:
    """
    The rows of a few sequences without holes, of which `selected` `[B, T]` has tokens, `among` some rows if any are
    given: the shortest, others with its prompt, and one or more with another prompt if there is any.
    """
    mask = call.attention_mask.bool()
    padded = Rows(call.input_ids, call.attention_mask, call.logits_to_keep, selected, selected.any(1))
    lengths = (mask.sum(1) * selected.any(1)).masked_fill(padded.with_holes(mask), 0)
    order = [row for length, row in sorted(zip(lengths.tolist(), range(len(lengths)), strict=True)) if length]
    order = [row for row in order if not among or row in among]
    prompts = prompts_of(call)
    siblings = [row for row in order if prompts[row] == prompts[order[0]]][: ROWS_TRIED - 1]
    return sorted([*siblings, *(row for row in order if row not in siblings)][:ROWS_TRIED])


def prompts_of(call: LogpsArgs) -> list[int]:
    """A number for the prompt of each row, the same for equal ones."""
    length = call.input_ids.shape[1] - call.logits_to_keep
    return prompt_group_ids(call.input_ids[:, :length], call.attention_mask[:, :length])


def narrowed(call: LogpsArgs, rows: Sequence[int]) -> LogpsArgs:
    """
    A batch with less padding on both sides of some of its rows, where it has more than [`_MOST_COLUMNS`]: as many
    columns as these rows need, and padding up to so many.
    """
    width, length, most = call.input_ids.shape[1], call.logits_to_keep, _MOST_COLUMNS
    if width <= most:
        return call
    used = call.attention_mask[list(rows)].any(0).nonzero()
    first, last = int(used.min()), max(int(used.max()) + 1, width - length + 1)
    spare = max(0, most - (last - first))
    first -= min(first, spare // 2)
    end = min(width, max(last, first + most))
    ids, mask = call.input_ids[:, first:end], call.attention_mask[:, first:end]
    return replace(call, input_ids=ids, attention_mask=mask, logits_to_keep=length - (width - end))
