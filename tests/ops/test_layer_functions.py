"""Norms, gated activations and rotary embeddings: kernels against a float64 computation, and against their formulas."""

import importlib

import pytest
import torch

from tests.ops.test_triton_kernels import DEVICE, INTERPRETED, gpu, kernels_run
from tests.oracle import relative_error
from trl_fused_grpo.ops.layer_functions import (
    GATED_KINDS,
    Gated,
    RMSNorm,
    Rotary,
    gated_formula,
    rms_norm_formula,
    rotary_formula,
)


pytest.importorskip("triton")

pytestmark = [gpu, kernels_run]

DTYPES = ("float32", "bfloat16", "float16")
every_dtype = pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
# Of what is rounded to a dtype, relative to the whole; the interpreter cuts bfloat16 off where a GPU rounds it
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2 if INTERPRETED else 4e-3, torch.float16: 8e-4}


def drawn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(DEVICE)


def results_and_gradients(function, inputs, upper):
    """What a function returns, and the gradients of the inputs that are leaves, in float64."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((result.double() * weight.double()).sum() for result, weight in zip(results, upper, strict=True))
    loss.backward()
    return results, [leaf.grad for leaf in leaves if leaf.requires_grad]


def check(kernel, formula, inputs, upper, bound):
    """Kernels are as near to the truth as rounding allows, and give the dtypes and layouts that the model has."""
    found, gradients = results_and_gradients(kernel, inputs, upper)
    model, model_gradients = results_and_gradients(formula, inputs, upper)
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    truth, true_gradients = results_and_gradients(formula, exact, upper)
    for mine, its, true in zip(
        (*found, *gradients), (*model, *model_gradients), (*truth, *true_gradients), strict=True
    ):
        assert mine.dtype == its.dtype
        assert mine.shape == its.shape
        error, its_error = relative_error(mine, true), relative_error(its, true)
        assert error <= max(1.1 * its_error, bound), f"{error:.2e}, the model's {its_error:.2e}"
    for mine, its in zip(found, model, strict=True):  # the layers view it as they would view the model's
        strides = zip(mine.shape, mine.stride(), its.stride(), strict=True)
        assert all(size == 1 or own == other for size, own, other in strides)


@every_dtype
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["float32-weight", "bfloat16-weight"])
@pytest.mark.parametrize(("offset", "casts_last"), [(0.0, False), (0.0, True), (1.0, True)])
def test_norms(dtype, weight_dtype, offset, casts_last):
    constants = 1e-6, offset, casts_last
    x = drawn(2, 9, 96, dtype=dtype, seed=1, scale=3.0).requires_grad_()
    weight = (drawn(96, dtype=weight_dtype, seed=2) + 1).requires_grad_()
    check(
        lambda x, weight: RMSNorm.apply(x, weight, *constants),
        lambda x, weight: rms_norm_in_one_dtype(x, weight, *constants),
        (x, weight),
        [drawn(2, 9, 96, seed=3)],
        ROUNDING[dtype],
    )


def rms_norm_in_one_dtype(x, weight, *constants):
    """The formula, which computes in float32, or in float64 for numbers of it."""
    if x.dtype != torch.float64:
        return rms_norm_formula(x, weight, *constants)
    eps, offset, _ = constants
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (67, 128), (3, 2048), (2, 5000), (40, 1)])
def test_norms_of_every_width(rows, width):
    x, weight = drawn(rows, width).requires_grad_(), drawn(width, seed=1).requires_grad_()
    constants = 1e-5, 0.0, False
    check(
        lambda x, weight: RMSNorm.apply(x, weight, *constants),
        lambda x, weight: rms_norm_in_one_dtype(x, weight, *constants),
        (x, weight),
        [drawn(rows, width, seed=2)],
        3e-6,
    )


def test_a_norm_of_tiny_and_of_no_values_keeps_its_eps():
    x = torch.cat([drawn(2, 64, scale=1e-5), drawn(1, 64, scale=0.0)]).requires_grad_()
    weight = drawn(64, seed=1)  # frozen
    constants = 1e-6, 0.0, False
    check(
        lambda x, weight: RMSNorm.apply(x, weight, *constants),
        lambda x, weight: rms_norm_in_one_dtype(x, weight, *constants),
        (x, weight),
        [drawn(3, 64, seed=2)],
        3e-6,
    )


@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
def test_a_norm_reads_what_is_not_contiguous_and_keeps_its_layout(is_part):
    x = drawn(3, 7, 4, 40 if is_part else 32)[..., :32].transpose(1, 2).requires_grad_()
    weight = drawn(32, 2, seed=1)[:, 0].requires_grad_()
    constants = 1e-6, 0.0, False
    check(
        lambda x, weight: RMSNorm.apply(x, weight, *constants),
        lambda x, weight: rms_norm_in_one_dtype(x, weight, *constants),
        (x, weight),
        [drawn(3, 4, 7, 32, seed=2)],
        3e-6,
    )


@every_dtype
@pytest.mark.parametrize("kind", GATED_KINDS)
def test_gated_activations(dtype, kind):
    gate = drawn(3, 7, 101, dtype=dtype, scale=4.0).requires_grad_()
    up = drawn(3, 7, 101, dtype=dtype, seed=1).requires_grad_()
    check(
        lambda gate, up: Gated.apply(gate, up, kind),
        lambda gate, up: gated_formula(gate, up, kind),
        (gate, up),
        [drawn(3, 7, 101, seed=2)],
        ROUNDING[dtype],
    )


@every_dtype
@pytest.mark.parametrize("kind", GATED_KINDS)
def test_gates_of_any_size_give_finite_gradients(dtype, kind):
    gate = torch.tensor([-6e4, -200.0, -30.0, 0.0, 30.0, 200.0, 6e4], device=DEVICE).to(dtype).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    _, gradients = results_and_gradients(lambda g, u: Gated.apply(g, u, kind), (gate, up), [torch.ones_like(gate)])
    _, expected = results_and_gradients(lambda g, u: gated_formula(g, u, kind), (gate, up), [torch.ones_like(gate)])
    for mine, its in zip(gradients, expected, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@every_dtype
@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16], ids=["float32-angles", "bfloat16-angles"])
@pytest.mark.parametrize(("heads", "width", "angles_alike"), [((4, 2), 16, False), ((3, 1), 6, True)])
def test_rotary_embeddings(dtype, angle_dtype, heads, width, angles_alike):
    batch, length = 2, 5
    q, k = (
        drawn(batch, length, count, width, dtype=dtype, seed=seed).transpose(1, 2).requires_grad_()
        for seed, count in enumerate(heads)
    )
    angles = drawn(1 if angles_alike else batch, length, width, seed=3, scale=10.0)
    check(
        Rotary.apply,
        rotary_formula,
        (q, k, angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)),
        [drawn(batch, count, length, width, seed=4) for count in heads],
        max(ROUNDING[dtype], ROUNDING[angle_dtype]) if angle_dtype != torch.float32 else ROUNDING[dtype],
    )


def test_rotary_embeddings_of_a_part_of_a_projection():
    """Queries and keys that one projection makes lie between others in memory."""
    together = drawn(1, 5, 3, 4, 8)
    q, k = (together[:, :, number].transpose(1, 2).requires_grad_() for number in (0, 1))
    angles = drawn(1, 5, 8, seed=1)
    for mine, its in zip(
        Rotary.apply(q, k, angles.cos(), angles.sin()), rotary_formula(q, k, angles.cos(), angles.sin()), strict=True
    ):
        torch.testing.assert_close(mine, its)


def test_queries_that_nobody_used_and_keys_that_are_frozen_get_no_gradient():
    angles = drawn(2, 5, 8, seed=3)
    q, k = drawn(2, 4, 5, 8).requires_grad_(), drawn(2, 2, 5, 8, seed=1).requires_grad_()
    Rotary.apply(q, k, angles.cos(), angles.sin())[1].square().sum().backward()
    assert q.grad is None
    expected = torch.autograd.grad(rotary_formula(q, k, angles.cos(), angles.sin())[1].square().sum(), k)
    torch.testing.assert_close(k.grad, expected[0])
    turned = Rotary.apply(q, k.detach(), angles.cos(), angles.sin())
    assert [result.requires_grad for result in turned] == [True, False]


def test_nothing_is_differentiated_twice():
    gate, upper = drawn(4).requires_grad_(), drawn(4, seed=2).requires_grad_()
    result = (Gated.apply(gate, drawn(4, seed=1), "silu") * upper).sum()
    (gradient,) = torch.autograd.grad(result, gate, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_frozen_weight_gets_no_gradient(monkeypatch):
    kernels = importlib.import_module("trl_fused_grpo.ops.kernels.layers")
    asked = []
    backward = kernels.rms_norm_backward
    monkeypatch.setattr(kernels, "rms_norm_backward", lambda *args: asked.append(args[-1]) or backward(*args))
    for requires_grad in (False, True):
        weight = drawn(8, seed=1).requires_grad_(requires_grad)
        RMSNorm.apply(drawn(2, 8).requires_grad_(), weight, 1e-6, 0.0, False).sum().backward()
    assert asked == [False, True]
