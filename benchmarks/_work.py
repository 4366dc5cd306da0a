"""The loss that every implementation in `loss.py` computes, and its values and gradients in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


SEQUENCE = 512  # tokens that share one advantage
CLIP = 0.2
BETA = 0.04
CHECKED_ROWS = 256
CHECKED_VOCAB = 2048


@dataclass(frozen=True)
class Work:
    """
    A head, rows of hidden states and a GRPO objective over their log-probabilities.

    Without `old_logps` the policy is on-policy. Without `ref_logps` there is no KL term. Rows from `grad_rows` on have
    advantage zero.
    """

    case: str
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]
    advantages: Tensor  # [N]
    grad_rows: int
    old_logps: Tensor | None = None  # [N]
    ref_logps: Tensor | None = None  # [N]
    autocast: bool = False
    grad: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, width and vocabulary."""
        return len(self.hidden), self.hidden.shape[1], len(self.weight)

    def loss(self, logps: Tensor, rows: slice = slice(None)) -> Tensor:
        """Sum of the per-token loss over `rows` with log-probs `logps` [n], divided by the number of all rows."""
        advantages = self.advantages[rows]
        old_logps = logps.detach() if self.old_logps is None else self.old_logps[rows]
        ratio = torch.exp(logps - old_logps)
        per_token = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        if self.ref_logps is not None:
            difference = self.ref_logps[rows] - logps
            per_token = per_token + BETA * (torch.exp(difference) - difference - 1)
        return per_token.sum() / len(self.hidden)

    def grad_logps(self, logps: Tensor, rows: slice = slice(None)) -> Tensor:
        """Gradient of [`Work.loss`] with respect to `logps` [n], in closed form."""
        scaled = self.advantages[rows] / -len(self.hidden)
        if self.old_logps is not None:
            ratio = torch.exp(logps - self.old_logps[rows])
            surrogate = ratio * scaled
            # The larger of the two losses counts, and a clipped ratio has no gradient
            scaled = surrogate * (surrogate >= ratio.clamp(1 - CLIP, 1 + CLIP) * scaled)
        if self.ref_logps is not None:
            scaled = scaled + (1 - torch.exp(self.ref_logps[rows] - logps)) * (BETA / len(self.hidden))
        return scaled


class Forecast:
    """The gradients of the objective: known in advance on-policy, else computed from the log-probabilities."""

    def __init__(self, work: Work):
        self.work, self.grad_rows = work, work.grad_rows

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the rows' log-probabilities. The objective does not depend on the entropies."""
        return self.work.grad_logps(logps, rows), None


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of all rows in float64, and what is needed for the gradients of some rows and tokens."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]
    logps: Tensor  # [N]
    lse: Tensor  # [N]

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, targets: Tensor) -> "Reference":
        """Compute the log-probabilities in float64, 512 rows at a time."""
        weight64 = weight.double()
        logps, lse = [], []
        for rows, target in zip(hidden.split(512), targets.split(512), strict=True):
            logits = rows.double() @ weight64.t()
            lse.append(logits.logsumexp(-1))
            logps.append(logits.gather(-1, target[:, None])[:, 0] - lse[-1])
        return cls(hidden, weight, targets, torch.cat(logps), torch.cat(lse))

    def errors(self, work: Work, logps: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> dict:
        """`||out - ref|| / ||ref||` of the log-probabilities, of the gradient of some rows and of some tokens."""
        found = {"logps": _error(logps, self.logps)}
        if grad_hidden is None:
            return found
        grads = work.grad_logps(self.logps)  # [N]
        rows = slice(0, None, max(1, len(self.hidden) // CHECKED_ROWS))  # some of every sequence
        dlogits = self._dlogits(rows, slice(None), grads)  # [rows, V]
        found["hidden"] = _error(grad_hidden[rows], dlogits @ self.weight.double())
        if grad_weight is not None:
            tokens = slice(0, CHECKED_VOCAB)
            dlogits = self._dlogits(slice(None), tokens, grads)  # [N, tokens]
            found["weight"] = _error(grad_weight[tokens], dlogits.t() @ self.hidden.double())
        return found

    def _dlogits(self, rows: slice, tokens: slice, grads: Tensor) -> Tensor:
        logits = self.hidden[rows].double() @ self.weight[tokens].double().t()
        dlogits = -(logits - self.lse[rows, None]).exp() * grads[rows, None]
        local = torch.arange(tokens.start or 0, (tokens.start or 0) + logits.shape[1], device=logits.device)
        return dlogits + (self.targets[rows, None] == local) * grads[rows, None]


def _error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.detach().double() - expected).norm() / expected.norm()).item()


def make(rows: int, width: int, vocab: int, device: str, dtype: torch.dtype) -> tuple[Work, Reference]:
    """Random hidden states and a head whose logits have a standard deviation of 3, on-policy, everything trained."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden, weight = normal(rows, width).to(dtype), (normal(vocab, width) * 3 / width**0.5).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator, device=device)
    advantages = normal(-(-rows // SEQUENCE)).repeat_interleave(SEQUENCE)[:rows]
    work = Work("on-policy", hidden, weight, targets, advantages, rows)
    return work, Reference.of(hidden, weight, targets)


def as_case(case: str, base: Work, reference: Reference) -> Work:
    """Turn on-policy work into one of the cases of `loss.py`. Its parameters are new leaves."""
    work = replace(base, case=case)
    generator = torch.Generator(base.hidden.device).manual_seed(1)
    noise = torch.randn(2, len(base.hidden), generator=generator, device=base.hidden.device)
    if case == "off-policy":
        old_logps, ref_logps = (reference.logps.float() + scale * n for scale, n in zip((0.1, 0.3), noise, strict=True))
        work = replace(work, old_logps=old_logps, ref_logps=ref_logps)
    elif case == "half-zero-grad":
        grad_rows = len(base.hidden) // 2
        advantages = base.advantages.clone()
        advantages[grad_rows:] = 0.0
        work = replace(work, advantages=advantages, grad_rows=grad_rows)
    elif case == "no-grad":
        work = replace(work, grad=False)
    elif case == "fp32-master":
        work = replace(work, hidden=base.hidden.float(), weight=base.weight.float(), autocast=True)
    hidden = work.hidden.detach().requires_grad_(work.grad)
    weight = work.weight.detach().requires_grad_(work.grad and case != "frozen")
    return replace(work, hidden=hidden, weight=weight)
