"""Dense oracle of the fused linear function, and a forecast with known gradients. Imports nothing from the package."""

from types import SimpleNamespace

import torch


def dense_logps(hidden, weight, targets, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    """Log-probabilities and entropies `[N]` of a linear head, from all `[N, V]` logits."""
    z = hidden @ weight.t()
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    logps = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)


def relative_error(value, truth):
    """Norm of the difference over the norm of the truth, in float64; infinite where the difference is not finite."""
    value, truth = value.double(), truth.double()
    error = ((value - truth).norm() / truth.norm().clamp(min=1e-300)).item()
    return error if error == error else float("inf")


class KnownGradients:
    """A forecast that returns given gradients `[N]`; rows from `grad_rows` on are forecast to have none."""

    def __init__(self, grad_logps, grad_entropies=None, grad_rows=None):
        self.grad_logps, self.grad_entropies = grad_logps, grad_entropies
        self.grad_rows = len(grad_logps) if grad_rows is None else grad_rows

    def __call__(self, rows, logps, entropies):
        return self.grad_logps[rows], None if self.grad_entropies is None else self.grad_entropies[rows]


class KnownGroups:
    """
    A forecast of the loss [`loss`]: of each group that ends at `ends` an exponential of its mean, times `weights`, and
    of each row its log-probability times `own` `[N]`.
    """

    def __init__(self, ends, weights, own=None):
        self.ends, self.weights, self.own = ends, weights, own
        self.grad_rows = ends[-1]
        self.groups = SimpleNamespace(ends=ends, have_equal_grads=own is None)

    def _loss(self, logps, start):
        """Of the rows from `start` on, which are whole groups."""
        total = 0.0 if self.own is None else (logps * self.own[start : start + len(logps)]).sum()
        for first, end, weight in zip([0, *self.ends], self.ends, self.weights, strict=False):
            if start <= first and end <= start + len(logps):
                total = total + weight * (logps[first - start : end - start].mean() + 5).exp()
        return total

    def loss(self, logps):
        """A scalar."""
        return self._loss(logps[: self.grad_rows], 0)

    def __call__(self, rows, logps, entropies):
        assert {rows.start, rows.stop} <= {0, *self.ends}, "only whole groups have a gradient"
        with torch.enable_grad():
            leaf = logps.detach().requires_grad_()
            return 8 * torch.autograd.grad(self._loss(leaf, rows.start), leaf)[0], None
