"""Projections that share an input: their products, and its gradient, are those of separate casts, to the bit."""

from unittest import mock

import pytest
import torch

from tests.modeling.built import built
from tests.modeling.kernels import gradients
from tests.modeling.projections import WIDTH, Projections, run
from tests.ops.test_triton_kernels import DEVICE, gpu, kernels_run
from trl_fused_grpo.ops.layer_functions import SharedCast


# On a GPU, or in Triton's interpreter
with_kernels = [gpu, kernels_run]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
class TestWithKernels:
    pytestmark = with_kernels

    def test_gradients_are_those_of_separate_casts_to_the_bit(self, count):
        module = Projections(count).to(DEVICE)
        expected, _ = run(module, share=False)
        found, shared = run(module)
        assert shared.call_count == (count > 1)
        assert all(map(torch.equal, found, expected))

    def test_a_gradient_that_nobody_asks_for_is_none(self, count):
        x = torch.randn(2, WIDTH, device=DEVICE, requires_grad=True)
        casts = SharedCast.apply(x, torch.bfloat16, count)
        casts[count // 2].float().pow(2).sum().backward()
        assert torch.equal(x.grad, (2 * x.detach().bfloat16().float()).bfloat16().float())


def first_without_grad(module, x):
    with torch.no_grad():
        first = module.part0(x)
    return first * module.part1(x) + module.part2(x)


def first_in_inference_mode(module, x):
    with torch.inference_mode():
        first = float(module.part0(x).sum())
    return first * module.part1(x) + module.part2(x)


def later_a_leaf(module, x):
    x = x.detach()
    first = module.part0(x)
    return first + module.part1(x.requires_grad_()) + module.part2(x)


def later_detached(module, x):
    x = x * 1
    return module.part0(x) + module.part1(x.detach_()) + module.part2(x)


def one_in_another_dtype(module, x):
    first = module.part0(x)
    with torch.autocast(DEVICE, torch.float16):
        second = module.part1(x)
    return first + second.bfloat16() + module.part2(x)


def one_without_autocast(module, x):
    first = module.part0(x)
    with torch.autocast(DEVICE, enabled=False):
        second = module.part1(x)
    return first + second + module.part2(x)


def of_a_leaf(module, x):
    leaf = x.detach().requires_grad_()
    total = module.part0(leaf) + module.part1(leaf) * 3 + module.part2(leaf)
    total.float().pow(2).sum().backward(retain_graph=True)
    return x * leaf.grad


PATTERNS = (
    *(first_without_grad, first_in_inference_mode, later_a_leaf, later_detached),
    *(one_in_another_dtype, one_without_autocast, of_a_leaf),
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
class TestStates:
    pytestmark = with_kernels

    def test_gradients_are_those_of_separate_casts(self, pattern):
        module = Projections(3).to(DEVICE)
        with mock.patch.object(Projections, "forward", pattern):
            expected, _ = run(module, share=False)
            found, _ = run(module, times=3)
        for mine, its in zip(found, expected, strict=True):
            assert (mine is None) == (its is None)
            assert mine is None or torch.allclose(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "lfm2", "qwen2"])
class TestInAModel:
    pytestmark = with_kernels

    def test_each_layer_casts_what_its_projections_share_once(self, kind):
        model = built(kind).to(DEVICE)
        with (
            torch.autocast(DEVICE, torch.bfloat16),
            mock.patch.object(SharedCast, "apply", side_effect=SharedCast.apply) as shared,
        ):
            first = gradients(model, kernels=True)
            in_first = shared.call_count
            found = gradients(model, kernels=True)
        # The layers are computed again in backward, where the first forward has shown who shares what
        assert 0 < in_first < shared.call_count - in_first
        assert torch.equal(found, first)


def test_without_autocast_inputs_are_left_alone():
    module = Projections(3).to(DEVICE)
    expected, _ = run(module, share=False, enabled=False)
    found, shared = run(module, enabled=False)
    assert not shared.called
    assert all(map(torch.equal, found, expected))


def test_inputs_of_the_products_dtype_are_left_alone():
    _, shared = run(
        Projections(3, torch.bfloat16).to(DEVICE), x=torch.ones(3, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    )
    assert not shared.called
