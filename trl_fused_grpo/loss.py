"""The extended chunked Liger loss: its options, and the forecast that the trainer asks it for."""

from torch import Tensor

from .forecast import BatchForecast, forecast
from .objective import GRPOBatch, GRPOObjective


class FusedLinearGRPOLoss:
    """
    The GRPO loss over a fused linear head, with everything TRL's objective depends on.

    Args:
        objective ([`GRPOObjective`]):
            Loss type and its options, under TRL's names.
    """

    def __init__(self, objective: GRPOObjective):
        self.objective = objective

    def forecast(
        self,
        mask: Tensor,
        advantages: Tensor,
        old_per_token_logps: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        normalizer: Tensor | float = 1.0,
        accumulation: float = 1.0,
        entropy_normalizer: Tensor | float | None = None,
    ) -> BatchForecast | None:
        """
        Forecast the gradient of every token of a micro-batch; `None` where the objective allows none.

        Args:
            mask (`Tensor`): `[B, T]`, the completion mask times the tool mask.
            advantages (`Tensor`): `[B]`, `[B, 1]` or `[B, T]`.
            old_per_token_logps, ref_per_token_logps (`Tensor`, *optional*): `[B, T]`, nats.
            vllm_is_ratio (`Tensor`, *optional*): `[B, T]` or `[B, 1]`.
            normalizer (`Tensor` or `float`): tokens of the accumulation window per process.
            accumulation (`float`): gradient accumulation steps.
            entropy_normalizer (`Tensor` or `float`, *optional*): divisor of the entropy bonus.
        """
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        batch = GRPOBatch(
            mask=mask,
            advantages=advantages,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_sampling_ratio=vllm_is_ratio,
            normalizer=normalizer,
            accumulation=accumulation,
            entropy_normalizer=entropy_normalizer,
        )
        return forecast(self.objective, batch)
