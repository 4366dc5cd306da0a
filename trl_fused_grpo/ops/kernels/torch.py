"""The kernels in plain torch, for any device. `kernels/triton.py` has the same functions for CUDA."""

import torch
from torch import Tensor

from . import LogitTransform


# exp() of anything below underflows, and 0 * -1e4 is 0 where 0 * -inf would be NaN
_LOG_ZERO = -1e4


def _transform(logits: Tensor, transform: LogitTransform) -> Tensor:
    """Transformed logits in float32 at least; `logits` itself where there is nothing to change."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if transform.logit_scale != 1.0:
        z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    if transform.temperature != 1.0:
        z = z / transform.temperature
    return z


def logprob_forward(
    logits: Tensor,  # [n, V], raw
    targets: Tensor,  # [n], int64
    transform: LogitTransform,
    logps: Tensor,  # [n], filled in, as the next two: float32, or float64 for float64 logits
    lse: Tensor,  # [n]
    entropies: Tensor | None,  # [n]
) -> None:
    """Compute log-probability of the target, log-sum-exp and entropy of each row of logits, in nats."""
    z = _transform(logits, transform)  # [n, V]
    highest = z.amax(-1, keepdim=True)  # [n, 1]
    u = (z - highest).clamp_(min=_LOG_ZERO)  # [n, V]
    target = (z.gather(-1, targets.unsqueeze(-1)) - highest).squeeze(-1)  # [n]
    if entropies is None:
        log_sum = u.exp_().sum(-1).log_()  # [n]
    else:
        e = u.exp()  # [n, V]
        total = e.sum(-1)  # [n]
        log_sum = total.log()  # [n]
        entropies.copy_(log_sum - torch.einsum("nv,nv->n", e, u) / total)
    logps.copy_(target - log_sum)
    lse.copy_(highest.squeeze(-1) + log_sum)


def logits_grad_(
    logits: Tensor,  # [n, v]
    targets: Tensor,  # [n], int64, of the whole vocabulary: they may lie outside the tile
    lse: Tensor,  # [n], as [`logprob_forward`] wrote it
    entropies: Tensor | None,  # [n], the same; read with `grad_entropies` only
    grad_logps: Tensor,  # [n]
    grad_entropies: Tensor | None,  # [n]
    transform: LogitTransform,
    vocab_start: int = 0,  # token id of the first column
) -> None:
    """Overwrite a tile of raw logits with the gradient with respect to them."""
    z = _transform(logits, transform)  # [n, v]; aliases `logits` when there is nothing to do
    if transform.softcap is not None:
        slope = 1 - (z * (transform.temperature / transform.softcap)) ** 2  # [n, v], 1 - tanh^2
    log_p = z.sub_(lse.unsqueeze(-1)) if z.data_ptr() == logits.data_ptr() else z - lse.unsqueeze(-1)  # [n, v]
    grad = _softmax_grad_(log_p, entropies, grad_logps, grad_entropies)  # [n, v]
    _add_at_targets_(grad, targets - vocab_start, grad_logps)
    if transform.softcap is not None:
        grad.mul_(slope)
    factor = transform.logit_scale / transform.temperature
    if factor != 1.0:
        grad.mul_(factor)
    if grad.data_ptr() != logits.data_ptr():
        logits.copy_(grad)


def _softmax_grad_(
    log_p: Tensor,  # [n, v]
    entropies: Tensor | None,  # [n]
    grad_logps: Tensor,  # [n]
    grad_entropies: Tensor | None,  # [n]
) -> Tensor:
    """The part of the gradient that every token has `[n, v]`, in the memory of `log_p`."""
    if grad_entropies is None:
        return log_p.exp_().mul_(-grad_logps.unsqueeze(-1))  # [n, v]
    assert entropies is not None, "a gradient of the entropies needs them"
    # -g p - ge p (log p + H) = -p (g + ge (log p + H))
    log_p.clamp_(min=_LOG_ZERO)
    weight = (log_p + entropies.unsqueeze(-1)).mul_(grad_entropies.unsqueeze(-1)).add_(grad_logps.unsqueeze(-1))
    return log_p.exp_().mul_(weight).neg_()  # [n, v]


def _add_at_targets_(
    grad: Tensor,  # [n, v]
    columns: Tensor,  # [n]
    grad_logps: Tensor,  # [n]
) -> None:
    """Add `grad_logps` in the column of each row's target; nothing where that lies outside the tile."""
    inside = (columns >= 0) & (columns < grad.shape[-1])  # [n]
    one_hot = torch.where(inside, grad_logps, 0.0).to(grad.dtype).unsqueeze(-1)  # [n, 1]
    grad.scatter_add_(-1, columns.clamp(0, grad.shape[-1] - 1).unsqueeze(-1), one_hot)
