"""The whole fused function with the Triton kernels, against a dense float64 computation."""

import pytest
import torch

from tests.oracle import KnownGradients, KnownGroups
from trl_fused_grpo.modeling.head.fused_forward import as_complex
from trl_fused_grpo.ops import kernels
from trl_fused_grpo.ops.linear_logps import FusedStats, fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead

from .test_triton_kernels import CUDA, DEVICE, TRANSFORMS, dense, error, gpu, kernels_run, on_gpu, triton_kernels


# The interpreter truncates to bfloat16 where the GPU rounds to nearest
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=on_gpu)]


@pytest.fixture(autouse=True)
def triton_on_every_device(monkeypatch):
    monkeypatch.setattr(kernels, "for_device", lambda device: triton_kernels)


def make_problem(dtype, shape=(252 if CUDA else 12, 507, 123)):
    generator = torch.Generator().manual_seed(1)
    n, vocab, width = shape
    hidden = torch.randn(n, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) * 3 / width**0.5
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(vocab, (n,), generator=generator).to(DEVICE)
    grads = torch.randn(2, n, generator=generator).to(DEVICE)
    return [x.to(DEVICE, dtype) for x in (hidden, weight, bias)], targets, grads


def dense_step(parameters, targets, transform, grad_logps, grad_entropies):
    """Outputs and gradients from dense logits, which are raised to float32 at least, as TRL does."""
    hidden, weight, bias = (x.detach().clone().requires_grad_() for x in parameters)
    logits = hidden @ weight.t() + bias  # two roundings, as in TRL's fused head
    logps, _, entropies = dense(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, transform)
    objective = (logps * grad_logps).sum() + (0 if grad_entropies is None else (entropies * grad_entropies).sum())
    return logps, entropies, *torch.autograd.grad(objective, (hidden, weight, bias))


@gpu
@kernels_run
@pytest.mark.parametrize("entropy_grad", [False, True], ids=["logps", "logps-and-entropies"])
@pytest.mark.parametrize("transform", [TRANSFORMS["plain"], TRANSFORMS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", ["frozen", "forecast", "wrong-forecast", "recompute"])
def test_fused_function_matches_float64(backward, dtype, transform, entropy_grad):
    parameters, targets, (grad_logps, grad_entropies) = make_problem(dtype)
    grad_entropies = grad_entropies if entropy_grad else None
    step = (targets, transform, grad_logps, grad_entropies)
    expected = dense_step([x.double() for x in parameters], *step)
    same_dtype = dense_step(parameters, *step)

    trained = 1 if backward == "frozen" else 3
    hidden, weight, bias = (x.clone().requires_grad_(i < trained) for i, x in enumerate(parameters))
    forecast = None
    if "forecast" in backward:
        known = grad_logps.roll(1) if backward == "wrong-forecast" else grad_logps
        forecast = KnownGradients(known, grad_entropies)
    logps, entropies = fused_linear_logps(
        hidden,
        LMHead(weight, bias, transform.logit_scale, transform.softcap),
        targets,
        transform.temperature,
        forecast=forecast,
        backward=backward.removeprefix("wrong-"),
        logits_mib=0.15 if CUDA else 0.02,  # several chunks
        entropy_grad=entropy_grad,
    )
    # As in the trainer, where the outputs pass through complex tensors: their gradients have a stride of two
    logps, entropies = as_complex(logps).real, as_complex(entropies).real
    objective = (logps * grad_logps).sum() + (0 if grad_entropies is None else (entropies * grad_entropies).sum())
    grads = torch.autograd.grad(objective, (hidden, weight, bias)[:trained])
    names = ("logps", "entropies", "hidden", "weight", "bias")
    for name, out, ref, dense_out in zip(names, (logps, entropies, *grads), expected, same_dtype, strict=False):
        # The bound in bfloat16 is the error of a dense computation in bfloat16; a correction is rounded once more
        slack = 2.0 if backward == "wrong-forecast" else 1.1
        bound = 1e-5 if dtype == torch.float32 else slack * error(dense_out, ref) + 1e-5
        assert error(out, ref) <= bound, name


@gpu
@on_gpu
def test_fused_function_repeats_to_the_bit():
    parameters, targets, (grad_logps, _) = make_problem(torch.bfloat16, (1000, 5003, 256))
    runs = []
    for _ in range(2):
        hidden, weight, bias = (x.clone().requires_grad_() for x in parameters)
        forecast = KnownGradients(grad_logps, None)
        logps, entropies = fused_linear_logps(hidden, LMHead(weight, bias), targets, forecast=forecast, logits_mib=2)
        runs.append((logps, entropies, *torch.autograd.grad((logps * grad_logps).sum(), (hidden, weight, bias))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@gpu
@on_gpu
@pytest.mark.parametrize("own", [False, True], ids=["one-gradient-a-group", "own-gradients"])
@pytest.mark.parametrize("group_mib", [None, 0.35], ids=["in-chunks", "whole-groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_rows_match_float64(dtype, group_mib, own):
    parameters, targets, (grads, _) = make_problem(dtype)
    ends = [140, 170, 230]
    known = KnownGroups(ends, grads, grads if own else None)

    def step(parameters):
        leaves = [x.clone().requires_grad_() for x in parameters]
        logits = leaves[0] @ leaves[1].t() + leaves[2]
        logps, _, _ = dense(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, TRANSFORMS["plain"])
        return logps, *torch.autograd.grad(known.loss(logps), leaves)

    expected, same_dtype = step([x.double() for x in parameters]), step(parameters)
    leaves = [x.clone().requires_grad_() for x in parameters]
    # A chunk has 128 rows
    options = {"logits_mib": 0.065 * dtype.itemsize, "group_mib": group_mib, "stats": (stats := FusedStats())}
    logps, _ = fused_linear_logps(leaves[0], LMHead(*leaves[1:]), targets, forecast=known, **options)
    results = logps, *torch.autograd.grad(known.loss(logps), leaves)
    for value, truth, dense_value in zip(results, expected, same_dtype, strict=True):
        assert error(value, truth) <= (1e-5 if dtype == torch.float32 else 1.1 * error(dense_value, truth) + 1e-5)
    # In chunks, where rows have gradients of their own, the first group is too long: with it more than half of the rows
    # have no forecast, so that all are computed again
    assert stats.recomputed == (230 if own and group_mib is None else 0)
