"""Which micro-batches share a forward: as many as the limit of tokens allows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_training import make_inputs
from trl_fused_grpo.training.partitioning import plan_merges, prompt_group_ids


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    limits=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    shares=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_shared_forwards_hold_as_many_micro_batches_as_the_limits_allow(shape, limits, shares, seed):
    count, rows = shape
    batches = [make_inputs(rows=rows, seed=seed + number) for number in range(count)]
    for batch in batches[1:]:
        batch["prompt_ids"], batch["prompt_mask"] = batches[0]["prompt_ids"], batches[0]["prompt_mask"]
    plans = plan_merges(batches, limits, shares)

    def tokens(start, end):
        ids, masks, completions = (
            torch.cat([batch[name] for batch in batches[start : end + 1]])
            for name in ("prompt_ids", "prompt_mask", "completion_mask")
        )
        keys = prompt_group_ids(ids, masks) if shares else range(len(ids))
        return int(completions.sum()) + sum(dict(zip(keys, masks.sum(1).tolist(), strict=True)).values())

    for limit, ends in zip(limits, plans, strict=True):
        for start, end in enumerate(ends):
            assert start <= end < count
            assert end == start or tokens(start, end) <= limit
            assert end == count - 1 or tokens(start, end + 1) > limit
