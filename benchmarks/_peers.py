"""The implementations that `loss.py` compares. Each turns a [`Work`] into its per-token log-probabilities."""

from collections.abc import Callable

import torch
from _work import SEQUENCE, Forecast, Work
from torch import Tensor

from trl_fused_grpo import FusedLinearGRPOLoss
from trl_fused_grpo.ops.linear_logps import Backward, FusedStats, fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead


Step = Callable[[], Tensor | None]


def _run(work: Work, logps_of: Callable[[], Tensor]) -> Step:
    """Loss forward and, when the work has gradients, backward; returns the log-probabilities where there are any."""

    def step() -> Tensor:
        with (
            torch.set_grad_enabled(work.grad),
            torch.autocast(work.hidden.device.type, torch.bfloat16, work.autocast),
        ):
            logps = logps_of()
            loss = work.loss(logps)
        if work.grad:
            loss.backward()
        return logps.detach()

    return step


def ours(work: Work, backward: Backward = "auto", logits_mib: float | None = None) -> Step:
    """This package. Raises when more than the few rows are recomputed whose terms cancel down to rounding noise."""
    forecast = None if backward == "recompute" else Forecast(work)
    stats = FusedStats()

    def logps_of() -> Tensor:
        return fused_linear_logps(
            work.hidden,
            LMHead(work.weight),
            work.targets,
            forecast=forecast,
            backward=backward,
            logits_mib=logits_mib,
            stats=stats,
        )[0]

    run = _run(work, logps_of)

    def step() -> Tensor | None:
        logps = run()
        if stats.recomputed > stats.rows / 1000 and backward != "recompute":
            raise RuntimeError(f"{work.case}: {stats.recomputed} of {stats.rows} rows were recomputed")
        return logps

    return step


def trl_fused_head(work: Work) -> Step | None:
    """The fused head of TRL >= 1.15, called as its GRPOTrainer does; `None` where TRL has none."""
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
    except ImportError:
        return None
    outputs = ("log_probs", "entropy")

    def logps_of() -> Tensor:
        return ChunkedLogProbFunction.apply(
            work.hidden, work.weight, None, work.targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )[0]

    return _run(work, logps_of)


def dense(work: Work) -> Step:
    """Full logits in float32, as in TRL before it had a fused head."""

    def logps_of() -> Tensor:
        log_p = (work.hidden @ work.weight.t()).float().log_softmax(-1)  # [N, V]
        return log_p.gather(-1, work.targets[:, None])[:, 0]

    return _run(work, logps_of)


def liger(work: Work, compiled: bool) -> Step | None:
    """Liger's fused linear GRPO loss: one sequence at a time, on-policy only. It returns no log-probabilities."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return None
    return _grpo_loss(LigerFusedLinearGRPOLoss, work, compiled)


def library(work: Work) -> Step:
    """This package's loss in the place of Liger's, called in the same way."""
    return _grpo_loss(FusedLinearGRPOLoss, work, compiled=False)


def _grpo_loss(loss_class: type, work: Work, compiled: bool) -> Step:
    rows, width, _ = work.shape
    loss_of = loss_class(beta=0.0, compiled=compiled, use_ref_model=False, loss_type="dapo")
    grid = (rows // SEQUENCE, SEQUENCE)

    def step() -> None:
        loss, _ = loss_of(
            work.hidden.view(*grid, width),
            work.weight,
            work.targets.view(grid),
            torch.ones(grid, device=work.hidden.device),
            work.advantages[::SEQUENCE],
        )
        loss.backward()

    return step


def bare_gemms(work: Work) -> dict[str, Step]:
    """The three matmuls of a loss over all rows at once, each by itself."""
    rows, _, vocab = work.shape
    dtype = torch.bfloat16 if work.autocast else work.hidden.dtype
    hidden, weight = work.hidden.detach().to(dtype), work.weight.detach().to(dtype)
    # Random values: matmuls of zeros run faster
    logits = torch.randn(rows, vocab, device=hidden.device, dtype=dtype)
    return {
        "logits": lambda: torch.mm(hidden, weight.t(), out=logits),
        "grad-hidden": lambda: torch.mm(logits, weight),
        "grad-weight": lambda: torch.mm(logits.t(), hidden),
    }
