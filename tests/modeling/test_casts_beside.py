"""Who casts a result is given what its kernel has written beside it, as long as it is the same."""

import gc

import pytest
import torch

from trl_fused_grpo.modeling import casts_beside
from trl_fused_grpo.modeling.casts_beside import CastWriter, cast_of


LOW = torch.bfloat16


class Doubling:
    """A kernel that notes for which dtypes it is asked."""

    def __init__(self, dtype=torch.float32):
        self.dtype, self.asked = dtype, []

    def __call__(self, x, low):
        self.asked.append(low)
        y = (2 * x).to(self.dtype)
        return y, None if low is None else (y.to(low),)


def run(writer, kernel):
    with torch.autocast("cpu", LOW):
        return writer.run(kernel, (torch.ones(3),))


def test_a_cast_is_written_where_the_last_result_was_cast():
    writer, kernel = CastWriter(), Doubling()
    first = run(writer, kernel)
    assert cast_of(first, LOW) is None
    second = run(writer, kernel)
    assert torch.equal(cast_of(second, LOW), second.to(LOW))
    third = run(writer, kernel)  # nobody casts it
    run(writer, kernel)
    assert kernel.asked == [None, LOW, LOW, None]
    assert third is not None


def test_a_result_that_was_changed_has_no_cast():
    writer, kernel = CastWriter(), Doubling()
    cast_of(run(writer, kernel), LOW)
    result = run(writer, kernel)
    assert cast_of(result * 1, LOW) is None
    assert cast_of(result, torch.float16) is None
    assert cast_of(result.add_(1), LOW) is None


def test_without_autocast_and_for_results_of_its_dtype_nothing_is_written():
    writer, kernel = CastWriter(), Doubling()
    cast_of(run(writer, kernel), LOW)
    assert cast_of(writer.run(kernel, (torch.ones(3),)), LOW) is None
    low = Doubling(LOW)
    result = run(CastWriter(), low)
    assert cast_of(result, LOW) is None
    with torch.inference_mode():
        assert cast_of(run(writer, kernel), LOW) is None
    assert kernel.asked == [None, None, None]


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_kept_longer_than_the_result(grad):
    gc.collect()
    before = len(casts_beside._offers)
    writer, kernel = CastWriter(), Doubling()
    with torch.set_grad_enabled(grad):
        results = [run(writer, kernel) for _ in range(3)]
        for result in results:
            cast_of(result, LOW)
        assert len(casts_beside._offers) == before + 3
        del result, results
    gc.collect()
    assert len(casts_beside._offers) == before
