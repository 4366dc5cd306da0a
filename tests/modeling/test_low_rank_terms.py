"""Low-rank terms beside the weight of a head, against dense logits in float64: what is trained, frozen and dropped."""

import pytest
import torch
from torch import nn

from tests.oracle import KnownGradients, dense_logps, relative_error
from trl_fused_grpo import FusedStats, LMHead, fused_linear_logps
from trl_fused_grpo.ops import chunked_linear
from trl_fused_grpo.ops.lm_head import LowRank


N, H, V, R = 37, 24, 83, 4


class LowRankProblem:
    """Hidden states, a head and two low-rank terms, one of them of another rank."""

    def __init__(self, bias=True, train_weight=False, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        self.frozen = {"weight": randn(V, H) / H**0.5}
        self.leaves = {
            "hidden": randn(N, H),
            "a0": randn(R, H),
            "b0": randn(V, R),
            "a1": randn(3, H),
            "b1": randn(V, 3),
        }
        if bias:
            self.leaves["bias"] = randn(V)
        if train_weight:
            self.leaves["weight"] = self.frozen.pop("weight")
        self.leaves = {name: value.to(dtype).requires_grad_() for name, value in self.leaves.items()}
        self.frozen = {name: value.to(dtype) for name, value in self.frozen.items()}
        self.targets = torch.randint(V, (N,), generator=generator).to(device)
        self.grads = randn(N)

    def fused(self, backward="auto", forecast=None):
        t = {**self.leaves, **self.frozen}
        low_rank = (LowRank(t["a0"], t["b0"], 0.5), LowRank(t["a1"], t["b1"], 0.3))
        head = LMHead(t["weight"], t.get("bias"), logit_scale=1.2, softcap=9.0, low_rank=low_rank)
        stats = FusedStats()
        logps, entropies = fused_linear_logps(
            t["hidden"], head, self.targets, 0.8, forecast, backward, logits_mib=0.004, stats=stats
        )
        return (logps, entropies, *torch.autograd.grad((logps * self.grads).sum(), self.leaves.values())), stats

    def truth(self):
        leaves = {name: value.detach().double().requires_grad_() for name, value in self.leaves.items()}
        t = {**leaves, **{name: value.double() for name, value in self.frozen.items()}}
        weight = t["weight"] + 0.5 * t["b0"] @ t["a0"] + 0.3 * t["b1"] @ t["a1"]
        logps, entropies = dense_logps(t["hidden"], weight, self.targets, t.get("bias"), 0.8, 1.2, 9.0)
        return logps, entropies, *torch.autograd.grad((logps * self.grads).sum(), leaves.values())


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen-weight", "trained-weight"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_low_rank_terms_are_exact_and_trained(backward, train_weight, bias):
    problem = LowRankProblem(bias, train_weight)
    values, stats = problem.fused(backward, KnownGradients(problem.grads) if backward == "forecast" else None)
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= 2e-6, errors
    assert (stats.backward, stats.recomputed) == (backward, 0 if backward == "forecast" else N)


def test_a_frozen_weight_beside_low_rank_terms_costs_no_gradient_of_its_size(monkeypatch):
    shapes = []
    add = chunked_linear.add_matmul
    monkeypatch.setattr(
        chunked_linear, "add_matmul", lambda a, b, out: (shapes.append(tuple(out.shape)), add(a, b, out))
    )
    problem = LowRankProblem()
    problem.fused(forecast=KnownGradients(problem.grads))
    assert set(shapes) == {(V, R + 3)}


def test_low_rank_terms_without_gradient_run_as_two_matmuls():
    problem = LowRankProblem(bias=False)
    for name in ("a0", "b0", "a1", "b1"):
        problem.frozen[name] = problem.leaves.pop(name).detach()
    values, stats = problem.fused()
    assert stats.backward == "frozen"
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= 2e-6, errors


def test_a_temperature_for_each_row_is_refused_under_a_softcap():
    head = LMHead(torch.randn(V, H), softcap=5.0)
    with pytest.raises(ValueError, match="does not go with a softcap"):
        fused_linear_logps(torch.randn(N, H), head, torch.zeros(N, dtype=torch.long), torch.ones(N))


def test_dropout_falls_on_the_low_rank_term_alone():
    hidden, targets = torch.ones(N, H), torch.zeros(N, dtype=torch.long)
    weight, a, b = torch.randn(V, H), torch.randn(R, H), torch.randn(V, R)
    torch.manual_seed(5)
    logps, _ = fused_linear_logps(hidden, LMHead(weight, low_rank=(LowRank(a, b, 2.0, dropout=0.4),)), targets)
    torch.manual_seed(5)
    dropped = nn.functional.dropout(hidden, 0.4)
    logits = hidden @ weight.T + 2.0 * dropped @ a.T @ b.T
    assert relative_error(logps, logits.log_softmax(-1)[:, 0]) < 1e-6


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", ["forecast", "recompute"])
def test_low_rank_terms_on_a_gpu(backward, dtype):
    problem = LowRankProblem(dtype=dtype, device="cuda")
    values, stats = problem.fused(backward, KnownGradients(problem.grads) if backward == "forecast" else None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= tolerance, errors
    assert stats.recomputed == (0 if backward == "forecast" else N)
