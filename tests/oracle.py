"""Dense float64 truth for the fused linear function. Imports nothing from the package."""

import torch


def dense_logps(hidden, weight, targets, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    """Log-probabilities and entropies `[N]` of a linear head, through the whole `[N, V]` of logits."""
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
    """Norm of the difference over the norm of the truth, in float64; NaN and infinities count as infinite."""
    value, truth = value.double(), truth.double()
    error = ((value - truth).norm() / truth.norm().clamp(min=1e-300)).item()
    return error if error == error else float("inf")
