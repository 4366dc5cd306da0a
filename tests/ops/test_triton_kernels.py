"""The Triton kernels against a dense float64 computation."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trl_fused_grpo.ops.kernels import LogitTransform, for_device


pytest.importorskip("triton")
triton_kernels = importlib.import_module("trl_fused_grpo.ops.kernels.triton")
torch_kernels = for_device(torch.device("cpu"))


CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
NAMES = ("logps", "lse", "entropies")

on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
kernels_run = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")
gpu = pytest.mark.gpu

TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(logit_scale=0.25),
    "zero-scale": LogitTransform(logit_scale=0.0),
    "softcap": LogitTransform(softcap=5.0),
    "all": LogitTransform(logit_scale=1.5, softcap=30.0, temperature=1.3),
}
SHAPES = {
    "odd": (252 if CUDA else 4, 507),
    "one-column": (3, 1),
    "narrow": (5, 7),
    "whole-blocks": (4, 16384),
    "blocks-and-rest": (3, 16999),
}
# (shape, transform, dtype): every transform on the odd shape, every shape plain, 16 bits with all options
CASES = [("odd", transform, "float32") for transform in TRANSFORMS]
CASES += [(shape, "plain", "float32") for shape in SHAPES if shape != "odd"]
CASES += [("odd", "all", "bfloat16"), ("odd", "all", "float16"), ("blocks-and-rest", "temperature", "bfloat16")]

every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
every_case = pytest.mark.parametrize(
    ("shape", "transform", "dtype"),
    [(SHAPES[shape], TRANSFORMS[transform], getattr(torch, dtype)) for shape, transform, dtype in CASES],
    ids=["-".join(case) for case in CASES],
)


def dense(raw: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle: log-probabilities, log-sum-exps and entropies of `raw` [n, V], in its dtype."""
    z = raw * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z / transform.temperature
    lse = torch.logsumexp(z, dim=-1)
    log_p = z - lse[:, None]
    entropies = torch.special.entr(log_p.exp()).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], lse, entropies


def dense_grad(raw: Tensor, targets: Tensor, transform: LogitTransform, grad_logps, grad_entropies=None) -> Tensor:
    """The oracle's gradient with respect to `raw`, by autograd."""
    raw = raw.detach().clone().requires_grad_()
    logps, _, entropies = dense(raw, targets, transform)
    objective = (logps * grad_logps).sum()
    if grad_entropies is not None:
        objective = objective + (entropies * grad_entropies).sum()
    return torch.autograd.grad(objective, raw)[0]


def error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, and 0 where both are zero."""
    difference = (actual.double() - expected.double()).norm().item()
    return difference / max(expected.double().norm().item(), 1e-30) if difference else 0.0


def make_rows(shape, dtype=torch.float32, spread=4.0, seed=0, row_stride=None):
    generator = torch.Generator().manual_seed(seed)
    n, vocab = shape
    logits = (torch.randn(n, vocab, generator=generator) * spread).to(dtype)
    targets = torch.randint(vocab, (n,), generator=generator)
    grads = torch.randn(2, n, generator=generator)
    buffer = torch.full((n, row_stride or vocab), float("nan"), dtype=dtype)
    buffer[:, :vocab] = logits
    return buffer.to(DEVICE)[:, :vocab], targets.to(DEVICE), *grads.to(DEVICE)


def logprob_forward(kernels, logits, targets, transform, entropy=True) -> tuple[Tensor, Tensor, Tensor | None]:
    logps, lse, entropies = torch.full((3, len(logits)), float("nan"), device=logits.device)
    kernels.logprob_forward(logits, targets, transform, logps, lse, entropies if entropy else None)
    return logps, lse, entropies if entropy else None


def logits_grad(kernels, logits, targets, transform, grad_logps, grad_entropies=None) -> Tensor:
    _, lse, entropies = logprob_forward(kernels, logits, targets, transform)
    grad = logits.clone()
    kernels.logits_grad_(
        grad, targets, lse, entropies if grad_entropies is not None else None, grad_logps, grad_entropies, transform
    )
    return grad


@gpu
@kernels_run
@every_case
def test_logprob_forward_matches_float64(shape, transform, dtype):
    logits, targets, *_ = make_rows(shape, dtype)
    expected = dense(logits.double(), targets, transform)
    outputs = logprob_forward(triton_kernels, logits, targets, transform)
    for name, out, ref in zip(NAMES, outputs, expected, strict=True):
        # Zero where there is one column, so the error is relative to 1 nat at least
        assert (out - ref).norm() <= 1e-6 * max(ref.norm(), len(ref) ** 0.5), name
    assert torch.equal(
        logprob_forward(triton_kernels, logits, targets, transform, entropy=False)[0],
        logprob_forward(triton_kernels, logits, targets, transform)[0],
    )


@gpu
@kernels_run
@pytest.mark.parametrize("entropy_grad", [False, True], ids=["logps", "logps-and-entropies"])
@every_case
def test_logits_grad_matches_float64(shape, transform, dtype, entropy_grad):
    logits, targets, grad_logps, grad_entropies = make_rows(shape, dtype)
    if not entropy_grad:
        grad_entropies = None
    grad = logits_grad(triton_kernels, logits, targets, transform, grad_logps, grad_entropies)
    expected = dense_grad(logits.double(), targets, transform, grad_logps, grad_entropies)
    # The interpreter truncates where the GPU rounds to nearest
    bound = {torch.float32: 3e-6, torch.bfloat16: 6e-3 if INTERPRETED else 3e-3, torch.float16: 4e-4}[dtype]
    # The gradient of a single column is zero but for rounding
    assert (grad - expected).norm() <= bound * max(expected.norm(), 1.0)


@gpu
@kernels_run
@every_transform
def test_triton_kernels_agree_with_the_torch_kernels(transform):
    logits, targets, *grads = make_rows((5, 507))
    both = (logprob_forward(kernels, logits, targets, transform) for kernels in (triton_kernels, torch_kernels))
    for triton_out, torch_out in zip(*both, strict=True):
        torch.testing.assert_close(triton_out, torch_out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        logits_grad(triton_kernels, logits, targets, transform, *grads),
        logits_grad(torch_kernels, logits, targets, transform, *grads),
        rtol=1e-5,
        atol=1e-6,
    )


@gpu
@kernels_run
@pytest.mark.parametrize("row_stride", [508, 512, 640])
def test_row_stride_may_exceed_the_width(row_stride):
    logits, targets, *grads = make_rows((5, 507), row_stride=row_stride)
    raw = logits.double()
    # An aligned stride allows wider loads, hence another order of summation: equal to rounding, not to the bit
    outputs = logprob_forward(triton_kernels, logits, targets, LogitTransform())
    for out, ref in zip(outputs, dense(raw, targets, LogitTransform()), strict=True):
        assert error(out, ref) <= 1e-6
    triton_kernels.logits_grad_(logits, targets, *outputs[1:], *grads, LogitTransform())
    assert error(logits, dense_grad(raw, targets, LogitTransform(), *grads)) <= 3e-6
    between = logits.as_strided((5, row_stride - 507), (row_stride, 1), 507)
    assert between.isnan().all(), "wrote between the rows"


@gpu
@kernels_run
def test_vocabulary_tiles_add_up_to_the_whole_gradient():
    logits, targets, *grads = make_rows((3, 1021))
    transform = TRANSFORMS["all"]
    expected = logits_grad(triton_kernels, logits, targets, transform, *grads)
    _, lse, entropies = logprob_forward(triton_kernels, logits, targets, transform)
    for start in range(0, 1021, 256):
        tile = logits[:, start : start + 256]
        triton_kernels.logits_grad_(tile, targets, lse, entropies, *grads, transform, vocab_start=start)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@gpu
@kernels_run
def test_a_nan_row_leaves_the_other_rows_unchanged():
    logits, targets, *grads = make_rows((9, 507))
    healthy = [0, 1, 2, 3, 5, 6, 7, 8]
    expected = logprob_forward(triton_kernels, logits, targets, LogitTransform())
    expected_grad = logits_grad(triton_kernels, logits, targets, LogitTransform(), *grads)
    logits[4, 100] = float("nan")
    for out, ref in zip(logprob_forward(triton_kernels, logits, targets, LogitTransform()), expected, strict=True):
        assert torch.equal(out[healthy], ref[healthy])
        assert out[4].isnan()
    grad = logits_grad(triton_kernels, logits, targets, LogitTransform(), *grads)
    assert torch.equal(grad[healthy], expected_grad[healthy])
    assert grad[4].isnan().all()


@gpu
@kernels_run
def test_minus_infinity_is_a_token_of_probability_zero():
    logits, targets, *grads = make_rows((6, 20011))
    logits[:, 3:18000] = float("-inf")  # whole blocks, from the first columns on
    targets.fill_(2)
    outputs = logprob_forward(triton_kernels, logits, targets, LogitTransform())
    kept = torch.cat([logits[:, :3], logits[:, 18000:]], dim=-1).double()
    for out, ref in zip(outputs, dense(kept, targets, LogitTransform()), strict=True):
        assert error(out, ref) <= 1e-6
    grad = logits_grad(triton_kernels, logits, targets, LogitTransform(), *grads)
    expected = dense_grad(kept, targets, LogitTransform(), *grads)
    assert not grad[:, 3:18000].any()
    assert error(torch.cat([grad[:, :3], grad[:, 18000:]], dim=-1), expected) <= 3e-6


@gpu
@kernels_run
@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_large_logits_neither_overflow_nor_cancel(offset):
    logits, targets, *_ = make_rows((4, 507))
    logits.mul_(8).add_(offset)
    bounds = (1e-6, 1e-6, 1e-5)
    outputs = logprob_forward(triton_kernels, logits, targets, LogitTransform())
    for name, out, ref, bound in zip(
        NAMES, outputs, dense(logits.double(), targets, LogitTransform()), bounds, strict=True
    ):
        assert error(out, ref) <= bound, name


@gpu
@kernels_run
def test_kernels_repeat_to_the_bit():
    logits, targets, *grads = make_rows((3, 16999), torch.bfloat16)
    first, second = (logprob_forward(triton_kernels, logits, targets, TRANSFORMS["all"]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    first, second = (logits_grad(triton_kernels, logits, targets, TRANSFORMS["all"], *grads) for _ in range(2))
    assert torch.equal(first, second)


@gpu
@kernels_run
def test_zero_rows_launch_no_kernel():
    logits, targets, *grads = make_rows((0, 507))
    assert len(logprob_forward(triton_kernels, logits, targets, LogitTransform())[0]) == 0
    assert logits_grad(triton_kernels, logits, targets, LogitTransform(), *grads).shape == (0, 507)


@gpu
@on_gpu
def test_more_than_two_to_the_31_logits():
    n, vocab = 14_500, 151_936  # 2.2e9 logits
    assert n * vocab > 2**31
    logits = torch.empty(n, vocab, device=DEVICE, dtype=torch.bfloat16).normal_(std=4.0)
    targets = torch.randint(vocab, (n,), device=DEVICE)
    grads = torch.randn(2, n, device=DEVICE)
    rows = torch.tensor([0, 1, n // 2, 14_133, 14_134, 14_135, n - 1], device=DEVICE)  # row 14,134 crosses 2^31
    before = logits[rows].double()
    outputs = logprob_forward(triton_kernels, logits, targets, LogitTransform())
    assert not any(out.isnan().any() for out in outputs)
    for out, ref in zip(outputs, dense(before, targets[rows], LogitTransform()), strict=True):
        assert error(out[rows], ref) <= 1e-6
    triton_kernels.logits_grad_(logits, targets, outputs[1], outputs[2], *grads, LogitTransform())
    assert error(logits[rows], dense_grad(before, targets[rows], LogitTransform(), *grads[:, rows])) <= 3e-3


@gpu
@on_gpu
def test_more_rows_than_the_second_grid_axis_allows():
    logits, targets, *grads = make_rows((70_000, 123))
    assert (
        error(
            logprob_forward(triton_kernels, logits, targets, LogitTransform())[0],
            dense(logits.double(), targets, LogitTransform())[0],
        )
        <= 1e-6
    )
    expected = dense_grad(logits.double(), targets, LogitTransform(), *grads)
    assert error(logits_grad(triton_kernels, logits, targets, LogitTransform(), *grads), expected) <= 3e-6


@pytest.mark.slow
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tests above run without it")
@pytest.mark.parametrize(
    "expression", ["odd-all-float32 or frozen-dtype0-all-logps", pytest.param("", marks=pytest.mark.nightly)]
)
def test_kernels_pass_in_the_interpreter(expression):
    """Without a GPU, Triton's interpreter checks the kernels' logic on the CPU."""
    files = [__file__, str(Path(__file__).parent / "test_linear_logps_triton.py")]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-x", "-o", "addopts=", "--import-mode=importlib"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, "-k", expression], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout  # and were not all skipped
