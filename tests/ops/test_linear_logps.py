"""The fused linear function against a dense float64 oracle, in each backward mode."""

import functools

import pytest
import torch

from tests.oracle import KnownGradients, dense_logps, relative_error
from trl_fused_grpo import FusedStats, LMHead, fused_linear_logps
from trl_fused_grpo.ops import chunked_linear, recompute


N, H, V = 252, 123, 507
GRAD_ROWS = 200


class Problem:
    """Random rows, head and gradients of the outputs; rows from GRAD_ROWS on get no gradient."""

    def __init__(self, dtype=torch.float32, frozen=False, bias=True, entropy=False, **options):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden = randn(N, H).requires_grad_()
        self.weight = (randn(V, H) / H**0.5).requires_grad_(not frozen)
        self.bias = randn(V).requires_grad_(not frozen) if bias else None
        self.targets = torch.randint(V, (N,), generator=generator)
        self.grad_logps = randn(N).float()
        self.grad_logps[GRAD_ROWS:] = 0
        self.grad_entropies = randn(N).float() if entropy else None
        self.options = {"temperature": 0.7, "logit_scale": 1.3, "softcap": None, **options}

    def leaves(self):
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None and t.requires_grad]

    def head(self):
        return LMHead(self.weight, self.bias, self.options["logit_scale"], self.options["softcap"])

    def objective(self, logps, entropies, factor=1.0):
        loss = (logps * self.grad_logps).sum()
        if self.grad_entropies is not None:
            loss = loss + (entropies * self.grad_entropies).sum()
        return loss * factor

    def fused(self, forecast=None, factor=1.0, **call):
        stats = FusedStats()
        call = {"entropy_grad": self.grad_entropies is not None, "logits_mib": 0.05, **call}
        logps, entropies = fused_linear_logps(
            self.hidden, self.head(), self.targets, self.options["temperature"], forecast, stats=stats, **call
        )
        grads = torch.autograd.grad(self.objective(logps, entropies, factor), self.leaves())
        return (logps, entropies, *grads), stats

    def truth(self, factor=1.0):
        hidden, weight, bias = (
            None if t is None else t.detach().double() for t in (self.hidden, self.weight, self.bias)
        )
        leaves = []
        for copy, leaf in ((hidden, self.hidden), (weight, self.weight), (bias, self.bias)):
            if leaf is not None and leaf.requires_grad:
                leaves.append(copy.requires_grad_())
        logps, entropies = dense_logps(hidden, weight, self.targets, bias, **self.options)
        return (logps, entropies, *torch.autograd.grad(self.objective(logps, entropies, factor), leaves))


def assert_close(values, truths, tolerance):
    errors = [relative_error(value, truth) for value, truth in zip(values, truths, strict=True)]
    assert max(errors) <= tolerance, errors


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["no-softcap", "softcap"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logps", "logps-and-entropy"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained-head", "frozen-head"])
def test_values_and_gradients_without_a_forecast_equal_the_oracle(frozen, entropy, bias, softcap):
    problem = Problem(frozen=frozen, bias=bias, entropy=entropy, softcap=softcap)
    values, stats = problem.fused()
    assert_close(values, problem.truth(), 2e-6)
    assert stats.backward == ("frozen" if frozen and not entropy else "recompute")


@pytest.mark.parametrize("factor", [1.0, 0.125, -3e4], ids=["unscaled", "accumulated", "loss-scaled"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logps", "logps-and-entropy"])
def test_a_right_forecast_recomputes_no_row_at_any_scale_of_the_gradient(entropy, factor):
    problem = Problem(entropy=entropy)
    grad_entropies = 7 * problem.grad_entropies if entropy else None
    forecast = KnownGradients(7 * problem.grad_logps, grad_entropies, N if entropy else GRAD_ROWS)
    values, stats = problem.fused(forecast, factor)
    assert_close(values, problem.truth(factor), 2e-6)
    assert (stats.backward, stats.rows, stats.recomputed) == ("forecast", N, 0)


def _partly_wrong(grad):
    return torch.cat([-2 * grad[:20], grad[20:]])


WRONG_FORECASTS = {
    "wrong-everywhere": lambda grad: KnownGradients(torch.ones_like(grad) * 100),
    "wrong-in-20-rows": lambda grad: KnownGradients(_partly_wrong(grad)),
    "wrong-by-orders-of-magnitude": lambda grad: KnownGradients(torch.where(torch.arange(N) % 9 == 0, 1e6, 1.0) * grad),
    "nan": lambda grad: KnownGradients(torch.where(torch.arange(N) == 3, float("nan"), grad)),
    "infinite": lambda grad: KnownGradients(torch.where(torch.arange(N) == 3, float("inf"), grad)),
    "all-zero": lambda grad: KnownGradients(torch.zeros_like(grad)),
    "too-few-rows-with-gradient": lambda grad: KnownGradients(grad, grad_rows=90),
}


@pytest.mark.parametrize("name", WRONG_FORECASTS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained-head", "frozen-head"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logps", "logps-and-entropy"])
def test_a_wrong_forecast_still_gives_the_right_gradients(name, frozen, entropy):
    problem = Problem(frozen=frozen, entropy=entropy)
    values, stats = problem.fused(WRONG_FORECASTS[name](problem.grad_logps))
    assert_close(values, problem.truth(), 3e-6)
    assert stats.recomputed > 0 or (frozen and not entropy)


def test_rows_without_gradient_are_not_recomputed():
    problem = Problem()
    _, stats = problem.fused(backward="recompute")
    assert stats.recomputed == GRAD_ROWS


def test_rows_forecast_without_gradient_enter_no_backward_gemm(monkeypatch):
    row_counts = []
    add = chunked_linear.GradAccumulator.add

    def counting_add(self, rows, logits, *rest):
        row_counts.append(len(logits))
        add(self, rows, logits, *rest)

    monkeypatch.setattr(chunked_linear.GradAccumulator, "add", counting_add)
    problem = Problem()
    problem.fused(KnownGradients(problem.grad_logps, grad_rows=GRAD_ROWS))
    assert sum(row_counts) == GRAD_ROWS


@pytest.fixture
def matmul_shapes(monkeypatch):
    """Shapes of the results of all matmuls."""
    shapes = []
    for module in (chunked_linear, recompute):
        for name in ("matmul", "add_matmul"):

            def recorded(original, a, b, out):
                shapes.append(tuple(out.shape))
                original(a, b, out=out)

            monkeypatch.setattr(module, name, functools.partial(recorded, getattr(module, name)))
    return shapes


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
@pytest.mark.parametrize("leaf", ["hidden", "weight"])
def test_a_gradient_that_is_not_needed_is_not_computed(leaf, backward, matmul_shapes):
    problem = Problem(bias=False)
    getattr(problem, leaf).requires_grad_(False)
    values, _ = problem.fused(KnownGradients(problem.grad_logps) if backward == "forecast" else None, backward=backward)
    assert_close(values, problem.truth(), 2e-6)
    of_hidden = [shape for shape in matmul_shapes if shape[1] == H and shape[0] != V]
    of_weight = [shape for shape in matmul_shapes if shape == (V, H)]
    assert (bool(of_hidden), bool(of_weight)) == (leaf != "hidden", leaf != "weight")


@pytest.mark.parametrize("frozen", [False, True], ids=["trained-head", "frozen-head"])
@pytest.mark.parametrize("logits_mib", [0.05, 0.6], ids=["several-tiles-of-rows", "one-tile-of-rows"])
def test_recomputation_splits_the_vocabulary_into_tiles(frozen, logits_mib, matmul_shapes, monkeypatch):
    monkeypatch.setattr(recompute, "_MIN_COLUMNS", 100)
    monkeypatch.setattr(recompute, "_MAX_COLUMNS", 100)
    problem = Problem(frozen=frozen, entropy=True)
    values, stats = problem.fused(logits_mib=logits_mib)
    assert_close(values, problem.truth(), 2e-6)
    assert stats.backward == "recompute"
    gradients_of_weight = [shape for shape in matmul_shapes if shape in ((128, H), (V - 3 * 128, H))]
    assert bool(gradients_of_weight) != frozen
    assert (V, H) not in matmul_shapes


def test_an_entropy_gradient_without_entropy_grad_is_right():
    problem = Problem(entropy=True)
    values, stats = problem.fused(KnownGradients(problem.grad_logps), entropy_grad=False)
    assert_close(values, problem.truth(), 2e-6)
    assert stats.recomputed > 0


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
def test_zero_rows_give_zero_gradients(backward):
    problem = Problem()
    nothing = KnownGradients(problem.grad_logps[:0], grad_rows=0)
    logps, _ = fused_linear_logps(
        problem.hidden[:0], problem.head(), problem.targets[:0], forecast=nothing, backward=backward
    )
    grads = torch.autograd.grad(logps.sum(), problem.leaves())
    assert [grad.abs().sum().item() for grad in grads] == [0.0, 0.0, 0.0]


def test_a_minus_infinite_logit_leaves_entropy_and_gradient_finite():
    hidden = torch.ones(3, 2, requires_grad=True)
    bias = torch.tensor([0.0, 1.0, float("-inf"), 0.5])
    head = LMHead(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), bias)
    logps, entropies = fused_linear_logps(hidden, head, torch.tensor([0, 1, 3]), entropy_grad=True)
    (grad,) = torch.autograd.grad(logps.sum() + entropies.sum(), hidden)
    assert logps.isfinite().all() and entropies.isfinite().all() and grad.isfinite().all()


def test_a_nan_row_leaves_the_other_rows_finite():
    problem = Problem(bias=False)
    poisoned = problem.hidden.detach().clone()
    poisoned[5] = float("nan")
    poisoned.requires_grad_()
    logps, _ = fused_linear_logps(poisoned, problem.head(), problem.targets)
    keep = torch.arange(N) != 5
    (grad,) = torch.autograd.grad((logps[keep] * problem.grad_logps[keep]).sum(), poisoned)
    assert logps[keep].isfinite().all() and logps[5].isnan()
    assert grad[keep].isfinite().all()


def test_the_first_derivative_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])

    def function(hidden, weight):
        return fused_linear_logps(hidden, LMHead(weight, softcap=3.0), targets, 0.8, entropy_grad=True)

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_double_backward_is_refused():
    problem = Problem()
    logps, _ = fused_linear_logps(problem.hidden, problem.head(), problem.targets)
    (grad,) = torch.autograd.grad(logps.square().sum(), problem.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("backward", ["frozen", "forecast", "recompute"])
def test_a_second_backward_through_a_retained_graph_gives_the_same_gradient(backward):
    problem = Problem(frozen=backward == "frozen")
    forecast = KnownGradients(problem.grad_logps) if backward == "forecast" else None
    logps, _ = fused_linear_logps(problem.hidden, problem.head(), problem.targets, forecast=forecast)
    loss = (logps * problem.grad_logps).sum()
    first = torch.autograd.grad(loss, problem.leaves(), retain_graph=True)
    second = torch.autograd.grad(loss, problem.leaves())
    assert_close(second, first, 1e-6)
