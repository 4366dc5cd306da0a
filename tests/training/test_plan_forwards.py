"""Which micro-batches share a forward: as many as the limit of tokens allows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_training import make_inputs
from trl_fused_grpo.training.plan import last_that_fit, plan_forwards


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    limit=st.integers(0, 90),
    shares=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_shared_forwards_hold_as_many_micro_batches_as_the_limit_allows(shape, limit, shares, seed):
    count, rows = shape
    batches = [make_inputs(rows=rows, seed=seed + number) for number in range(count)]
    for batch in batches[1:]:
        batch["prompt_ids"], batch["prompt_mask"] = batches[0]["prompt_ids"], batches[0]["prompt_mask"]
    (ends,) = last_that_fit(batches, [limit], shares)

    def tokens(start, end):
        ids, masks, completions = (
            torch.cat([batch[name] for batch in batches[start : end + 1]])
            for name in ("prompt_ids", "prompt_mask", "completion_mask")
        )
        prompts = [tuple(row[mask.bool()].tolist()) for row, mask in zip(ids, masks, strict=True)]
        keys = prompts if shares else range(len(ids))
        return int(completions.sum()) + sum(dict(zip(keys, masks.sum(1).tolist(), strict=True)).values())

    assert len(ends) == count
    for start, end in enumerate(ends):
        assert start <= end < count
        assert end == start or tokens(start, end) <= limit
        assert end == count - 1 or tokens(start, end + 1) > limit


@settings(deadline=None)
@given(data=st.data(), count=st.integers(1, 6), iterations=st.integers(1, 3), accumulation=st.integers(1, 7))
def test_planned_forwards_leave_no_gap_and_end_with_window_and_iteration(data, count, iterations, accumulation):
    ends = [data.draw(st.integers(number, count - 1)) for number in range(count)]
    ends_of_first = [data.draw(st.integers(end, count - 1)) for end in ends]
    start, steps_left = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, accumulation))
    begins = data.draw(st.booleans())
    forwards = plan_forwards(ends, ends_of_first, range(start, count * iterations), steps_left, accumulation, begins)
    assert [place for forward in forwards for place in forward.places] == [*range(start, count * iterations)]
    first_window = start + (steps_left or accumulation)
    borders = {*range(first_window, count * iterations, accumulation), *range(0, count * iterations, count)}
    for forward in forwards:
        first, last = forward.places[0], forward.places[-1]
        assert not borders & {*forward.places[1:]}
        opens = first >= first_window and (first - first_window) % accumulation == 0
        opens = opens or (first == start and (begins or steps_left == 0))
        most = (ends_of_first if opens else ends)[first % count]
        assert last % count <= most
        assert forward.needs_free_gradients == (last % count > ends[first % count])
        is_behind = first != start and first not in borders
        assert not is_behind or ends[(first - 1) % count] < last % count  # it could not begin earlier


def test_a_window_of_several_forwards_has_no_small_one_at_its_end():
    """The GPU would wait for the CPU there. Only the first may have as many as fit the memory of gradients."""
    ends, ends_of_first = [3, 4, 5, 6, 7, 7, 7, 7], [6, 7, 7, 7, 7, 7, 7, 7]

    def sizes(begins_window):
        forwards = plan_forwards(ends, ends_of_first, range(8), 8, 8, begins_window)
        return [len(forward.places) for forward in forwards]

    assert sizes(begins_window=True) == [4, 4]
    assert sizes(begins_window=False) == [4, 4]
    ends = [number // 2 * 2 + 1 for number in range(8)]
    assert sizes(begins_window=True) == [6, 2]
    assert sizes(begins_window=False) == [2, 2, 2, 2]
