"""The kernels in torch on a chunk or a tile of logits, against dense log-probabilities in float64; who runs them."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import dense_logps, relative_error
from trl_fused_grpo.ops import kernels
from trl_fused_grpo.ops.kernels import LogitTransform
from trl_fused_grpo.ops.kernels.torch import logits_grad_, logprob_forward


N, V = 9, 7
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(logit_scale=0.25),
    "temperature-and-scale-of-two": LogitTransform(logit_scale=2.0, temperature=2.0),  # the slope is one
    "scale-of-four": LogitTransform(logit_scale=4.0, temperature=2.0),  # and two
    "softcap": LogitTransform(softcap=5.0),
    "all": LogitTransform(logit_scale=1.5, softcap=3.0, temperature=1.3),
}
TARGETS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 0])  # each column
LOGITS, GRADS = torch.randn(N, V, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 2, N)
GRADS_OF_ENTROPIES = torch.linspace(0.5, -1.5, N)


def dense(logits, transform):
    """Log-probabilities and entropies of logits in float64, differentiable."""
    head = torch.eye(V, dtype=torch.float64), TARGETS, None
    return dense_logps(logits, *head, transform.temperature, transform.logit_scale, transform.softcap)


def forward(logits, transform, entropy=True):
    """Log-probabilities, log-sum-exp and entropies, in buffers that hold no numbers before."""
    outputs = torch.full((3, N), float("nan"), dtype=torch.promote_types(logits.dtype, torch.float32))
    logprob_forward(logits, TARGETS, transform, *outputs[:2], outputs[2] if entropy else None)
    return outputs


def gradient(logits, transform, grads_of_entropies=None, tiles=(0, V)):
    """The gradient with respect to logits, whose columns come in tiles."""
    _, lse, entropies = forward(logits, transform)
    parts = [logits[:, start:end].clone() for start, end in pairwise(tiles)]
    for part, start in zip(parts, tiles, strict=False):
        given = (None, GRADS, None) if grads_of_entropies is None else (entropies, GRADS, grads_of_entropies)
        logits_grad_(part, TARGETS, lse, *given, transform, *((start,) if start else ()))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_log_probs_and_entropies_are_those_of_dense_logits(name, dtype):
    logits, transform = LOGITS.to(dtype), TRANSFORMS[name]
    logps, lse, entropies = forward(logits, transform)
    expected = dense(logits.double(), transform)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert relative_error(logps, expected[0]) < tolerance
    assert relative_error(entropies, expected[1]) < tolerance
    alone = forward(logits, transform, entropy=False)
    assert relative_error(alone[0], logps) < tolerance and relative_error(alone[1], lse) < tolerance
    assert alone[2].isnan().all()


@pytest.mark.parametrize("tiles", [(0, V), (0, 1, 4, 5, V)], ids=["whole", "tiles"])
@pytest.mark.parametrize("has_entropies", [False, True], ids=["logps", "logps-and-entropies"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_of_a_tile_are_those_of_dense_logits(name, dtype, has_entropies, tiles):
    logits, transform = LOGITS.to(dtype), TRANSFORMS[name]
    leaf = logits.to(torch.float64, copy=True).requires_grad_()
    logps, entropies = dense(leaf, transform)
    loss = (logps * GRADS).sum() + has_entropies * (entropies * GRADS_OF_ENTROPIES).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    found = gradient(logits, transform, GRADS_OF_ENTROPIES if has_entropies else None, tiles)
    assert found.dtype == dtype
    assert relative_error(found, expected) < (5e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_token_that_cannot_be_drawn_leaves_the_others_as_they_are_without_it(name):
    transform = TRANSFORMS[name] if name == "plain" else LogitTransform(logit_scale=1.5, temperature=1.3)
    logits = LOGITS.double()
    logits[TARGETS.ne(3), 3] = -float("inf")
    leaf = logits.clamp(min=-1e6).requires_grad_()  # nothing of it is left in float64 either
    logps, entropies = dense(leaf, transform)
    loss = (logps * GRADS).sum() + (entropies * GRADS_OF_ENTROPIES).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    found = forward(logits.float(), transform)
    assert relative_error(found[0], logps.detach()) < 1e-6 and relative_error(found[2], entropies.detach()) < 1e-6
    assert relative_error(gradient(logits.float(), transform, GRADS_OF_ENTROPIES), expected) < 1e-6


class NewChunks(TorchDispatchMode):
    """Counts the tensors as large as the logits that are in other memory than these and were not there before."""

    def __init__(self, logits):
        super().__init__()
        self.known, self.count = {logits.untyped_storage().data_ptr()}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == N * V:
            memory = result.untyped_storage().data_ptr()
            self.count += memory not in self.known
            self.known.add(memory)
        return result


def test_a_plain_gradient_takes_no_memory_beside_the_logits():
    logits = LOGITS.clone()
    lse = forward(logits, TRANSFORMS["plain"])[1]
    with NewChunks(logits) as chunks:
        logits_grad_(logits, TARGETS, lse, None, GRADS, None, TRANSFORMS["plain"])
    assert chunks.count == 0
    with NewChunks(logits.bfloat16()) as chunks:
        logits_grad_(logits.bfloat16(), TARGETS, lse, None, GRADS, None, TRANSFORMS["plain"])
    assert chunks.count > 0


def test_a_gradient_of_entropies_without_entropies_is_told():
    lse = forward(LOGITS, TRANSFORMS["plain"])[1]
    with pytest.raises(AssertionError, match=r"^a gradient of the entropies needs them$"):
        logits_grad_(LOGITS.clone(), TARGETS, lse, None, GRADS, GRADS_OF_ENTROPIES, TRANSFORMS["plain"])


@pytest.mark.parametrize(
    ("device", "has_triton", "reason", "module"),
    [
        ("cpu", True, "Triton's kernels are for CUDA, and the device is cpu", "torch"),
        ("xpu", True, "Triton's kernels are for CUDA, and the device is xpu", "torch"),
        ("cuda", True, None, "triton"),
        ("cuda", False, "Triton is not installed", "torch"),
    ],
)
def test_kernels_are_those_of_triton_on_cuda_where_it_is_installed(device, has_triton, reason, module, monkeypatch):
    monkeypatch.setattr(kernels, "_triton_is_importable", lambda: has_triton)
    assert kernels.why_not_triton(torch.device(device)) == reason
    with mock.patch.object(kernels.importlib, "import_module", side_effect=lambda name: name):
        assert kernels.for_device(torch.device(device)) == f"trl_fused_grpo.ops.kernels.{module}"
