"""What chunks of rows share, and in which memory and dtype their gradients are summed."""

import pytest
import torch

from tests.oracle import relative_error
from trl_fused_grpo.ops.chunked_linear import ChunkedLinear, GradAccumulator
from trl_fused_grpo.ops.kernels import LogitTransform


N, H, V = 30, 8, 40
ROWS = torch.arange(N)


def linear_of(hidden_dtype=torch.float32, head_dtype=torch.float32, compute_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (V,)))
    targets = torch.randint(V, (N,), generator=generator)
    head = weight.to(head_dtype), bias.to(head_dtype)
    return ChunkedLinear(
        hidden.to(hidden_dtype), *head, None, targets, LogitTransform(1.0, None, 1.0), compute_dtype, 5
    )


def test_chunks_share_one_buffer_of_logits_and_a_weight_that_needs_no_cast():
    linear = linear_of()
    first = linear.compute_logits(slice(0, 10))
    assert linear.compute_logits(slice(10, 20)).data_ptr() == first.data_ptr()
    assert linear.compute_logits(slice(20, 25)).data_ptr() == first.data_ptr()
    assert linear.cast_weight.data_ptr() == linear.weight.data_ptr()


@pytest.mark.parametrize(
    ("hidden", "compute", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float32),  # lacks the range
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_sums_are_in_float32_and_rows_in_no_more_than_they_need(hidden, compute, expected):
    accumulator = GradAccumulator(linear_of(hidden, compute, compute), (True, True, True, False))
    assert accumulator.hidden.dtype == expected
    assert accumulator.weight.dtype == accumulator.bias.dtype == torch.float32


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16])
def test_finished_gradients_have_the_dtypes_of_their_tensors_and_are_copied_for_a_cast_only(head, factor):
    accumulator = GradAccumulator(linear_of(head_dtype=head), (True, True, True, False))
    accumulator.weight.fill_(3.0)
    accumulator._head_is_empty = False
    accumulator.scale(factor)
    hidden, weight, bias, lora_b = accumulator.finish()
    assert (hidden.dtype, weight.dtype, bias.dtype, lora_b) == (torch.float32, head, head, None)
    assert (weight == 3 * factor).all()
    assert hidden.data_ptr() == accumulator.hidden.data_ptr()
    assert (weight.data_ptr() == accumulator.weight.data_ptr()) == (head == torch.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_reset", [False, True])
def test_chunks_and_groups_may_follow_each_other_in_any_order(is_reset):
    linear = linear_of()
    accumulator = GradAccumulator(linear, (True, True, True, False))
    leaves = [t.double().requires_grad_() for t in (linear.hidden, linear.weight, linear.bias)]
    z = leaves[0] @ leaves[1].t() + leaves[2]
    lse = z.logsumexp(-1).detach().float()
    factors = torch.ones(N)

    def add(to, rows):
        to.add(rows, linear.compute_logits(rows), lse[rows], None, torch.ones(rows.stop - rows.start), None)

    add(accumulator, slice(0, 10))
    if is_reset:
        accumulator.reset()
        factors[:10] = 0.0
    for start, factor in ((10, 3.0), (20, -0.5)):
        rows = slice(start, start + 10)
        group = accumulator.of_group(rows)
        add(group, slice(start, start + 5))
        add(group, slice(start + 5, start + 10))
        accumulator.add_group(group, rows, torch.tensor(factor))
        factors[rows] = factor
    logps = z.log_softmax(-1)[ROWS, linear.targets]
    truth = torch.autograd.grad((logps * factors).sum(), leaves)
    for value, exact in zip(accumulator.finish()[:3], truth, strict=True):
        assert relative_error(value, exact) < 2e-6
