"""`FusedLinearGRPOLoss`: Liger's chunked loss, extended, for training loops without a trainer."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from torch import Tensor, nn

from trl_fused_grpo.ops.linear_logps import FusedStats
from trl_fused_grpo.ops.lm_head import LMHead

from .batch import GRPOBatch, as_columns, as_divisor, check_shapes, zero_masked
from .forecast import forecast, grad_rows_first
from .metrics import GRPOLossOutput, named_metrics
from .objective import GRPOObjective, token_terms
from .reduction import luspo_counts_padding, reduce_loss, step_normalizer
from .selected_logps import head_of, reference_logps, selected_logps


class FusedLinearGRPOLoss(LigerFusedLinearGRPOLoss):
    """
    Drop-in replacement for Liger's `LigerFusedLinearGRPOLoss`: the same loss and metrics with fewer GEMMs (see
    [`fused_linear_logps`]), and further options. It has the arguments of Liger 0.8.5 with older releases too.

    ```python
    import torch
    from trl_fused_grpo import FusedLinearGRPOLoss

    hidden, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16)  # [B, T, H], [V, H]
    token_ids, mask, advantages = torch.randint(100, (2, 5)), torch.ones(2, 5), torch.tensor([1.0, -1.0])
    loss, metrics = FusedLinearGRPOLoss(beta=0.0)(hidden, weight, token_ids, mask, advantages)
    loss.backward()
    ```

    Args:
        beta, use_ref_model, epsilon_low, epsilon_high, loss_type, max_completion_length, importance_sampling_level,
        sapo_temperature_pos, sapo_temperature_neg, temperature, delta, use_bias_correction_kl, vespo_k_pos,
        vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg:
            As in Liger. Those from `sapo_temperature_pos` on go by name: their order differs between its releases.
        compiled, chunk_size:
            Accepted without effect: nothing is compiled, and `logits_mib` sets the size of a chunk.
        off_policy_mask_threshold (`float`, *optional*):
            Leave out the policy term of sequences with negative advantage whose sampling log-probs exceed the policy's
            by more than this, in nats per token.
        top_entropy_quantile (`float`, *optional*, defaults to `1.0`):
            Fraction of the call's tokens, those of highest entropy, that get a policy term.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the entropy bonus.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            `"k1"`, `"k2"`, `"k3"` or `"k4"`, see [`~objective.kl_loss`].
        reduction (`str`, *optional*):
            `"token_mean"`, `"sequence_mean"`, `"fixed_length"`, `"sequence_sum"` or `"sum"`, see
            [`~reduction.token_weights`], or SkyRL's name `"seq_mean_token_sum_norm"` for `"fixed_length"`. Defaults to
            that of the loss type.
        backward, logits_mib:
            As in [`fused_linear_logps`].

    The attribute `stats` tells what the last call did, see [`FusedStats`].

    Raises:
        `ValueError`: when a temperature of SAPO or `delta` is not positive.
    """

    logits_mib: float | None

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        *,  # Liger 0.6 has the temperature here, later releases three options on
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        off_policy_mask_threshold: float | None = None,
        top_entropy_quantile: float = 1.0,
        entropy_coef: float = 0.0,
        kl_estimator: str = "k3",
        reduction: str | None = None,
        backward: str = "auto",
        logits_mib: float | None = None,
    ):
        options = {name: value for name, value in vars().items() if name != "self"}
        nn.Module.__init__(self)  # Liger's constructor takes fewer arguments in older releases
        # Attributes with the names of the arguments, as in Liger: callers may set them later
        vars(self).update(options)
        self.stats = FusedStats()
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def objective(self) -> GRPOObjective:
        """The objective that the attributes describe now."""
        return GRPOObjective(**{field.name: getattr(self, field.name) for field in fields(GRPOObjective)})

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor | LMHead,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | LMHead | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        *,
        normalizer: Tensor | float | None = None,
        entropy_normalizer: Tensor | float | None = None,
        sampling_per_token_logps: Tensor | None = None,
        temperature: Tensor | None = None,
        return_outputs: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | GRPOLossOutput:
        """
        Loss of one micro-batch of `B` completions of at most `T` tokens.

        Args:
            _input (`Tensor`):
                Hidden states `[B, T, H]`; each predicts the token at its place.
            lin_weight, bias (`Tensor`):
                The head: `[V, H]` and, optional, `[V]`. Or an [`LMHead`] and no bias.
            selected_token_ids (`Tensor`):
                `[B, T]`, int64. Any value is allowed where the mask is zero.
            attention_mask (`Tensor`):
                Loss mask `[B, T]`. Logits are computed only where it is not zero.
            advantages (`Tensor`):
                `[B]`, `[B, 1]` or `[B, T]`.
            ref_per_token_logps, old_per_token_logps (`Tensor`, *optional*):
                `[B, T]`, nats. Without old log-probabilities the policy is the old policy.
            ref_input, ref_weight, ref_bias (`Tensor`, *optional*):
                Hidden states `[B, T, H]` and head of the reference, as the policy's, instead of its log-probabilities.
            vllm_is_ratio (`Tensor`, *optional*):
                Ratio of policy and sampler, `[B]`, `[B, 1]` or `[B, T]`.
            num_items_in_batch (`Tensor` or `float`, *optional*):
                Tokens of the optimizer step over all processes, for DAPO, CISPO, VESPO and `"token_mean"`. Other loss
                types ignore them, as in Liger; another `reduction` refuses them.
            normalizer (`Tensor` or `float`, *optional*):
                Divisor of the loss instead of this call's number of tokens or, by reduction, sequences. With those of
                the whole optimizer step, per process, the gradient does not depend on how it is cut into calls.
            entropy_normalizer (`Tensor` or `float`, *optional*):
                Divisor of the entropy bonus instead of this call's number of tokens.
            sampling_per_token_logps (`Tensor`, *optional*):
                The sampler's `[B, T]`, nats, for the off-policy sequence mask. Defaults to the old log-probabilities.
            temperature (`Tensor`, *optional*):
                Sampling temperature of each sequence or token: `[B]`, `[B, 1]` or `[B, T]`.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Whether to return a [`GRPOLossOutput`].

        Returns:
            `tuple[Tensor, tuple[Tensor, ...]]`:
                The loss and, as in Liger, two metrics: the KL divergence (only if `beta` is not zero) and the fraction
                of clipped tokens.

        Raises:
            `ValueError`: when options exclude each other or shapes do not fit.
        """
        objective = self.objective
        objective.check()
        check_shapes(
            selected_token_ids,
            per_token={
                "_input": _input[..., 0],
                "attention_mask": attention_mask,
                "ref_per_token_logps": ref_per_token_logps,
                "old_per_token_logps": old_per_token_logps,
                "sampling_per_token_logps": sampling_per_token_logps,
            },
            per_sequence={"advantages": advantages, "vllm_is_ratio": vllm_is_ratio, "temperature": temperature},
        )
        mask = attention_mask.float()  # [B, T]
        normalizer = step_normalizer(objective, mask, num_items_in_batch, normalizer)
        selected, has_kl = mask != 0, self.use_ref_model and self.beta != 0.0
        has_token_ratio = vllm_is_ratio is not None and as_columns(vllm_is_ratio).shape[1] > 1
        if luspo_counts_padding(objective, has_kl, has_token_ratio):
            objective, selected = replace(objective, reduction="padded_sequence_sum"), torch.ones_like(selected)
        temperatures = self.temperature if temperature is None else temperature
        logps_of = partial(selected_logps, selected_token_ids, temperatures, logits_mib=self.logits_mib)
        reference = ref_per_token_logps, ref_input, ref_weight, ref_bias
        ref_per_token_logps = reference_logps(*reference, selected, logps_of) if has_kl else None
        batch = GRPOBatch(
            mask=mask,
            advantages=zero_masked(advantages, selected),
            old_per_token_logps=zero_masked(old_per_token_logps, selected),
            ref_per_token_logps=zero_masked(ref_per_token_logps, selected),
            # VESPO sums the logs of all ratios, as TRL and Liger do; a zero would change the sum
            importance_sampling_ratio=zero_masked(vllm_is_ratio, selected | (objective.loss_type == "vespo")),
            sampling_per_token_logps=zero_masked(sampling_per_token_logps, selected),
            normalizer=normalizer,
            entropy_normalizer=as_divisor("entropy_normalizer", entropy_normalizer, mask.device),
        )
        logps_of = partial(logps_of, _input, head_of(lin_weight, bias))
        logps, entropies = self._policy_logps(objective, batch, selected, logps_of, return_outputs)  # [B, T]
        return self._outputs(objective, batch, logps, entropies, return_outputs)

    def _policy_logps(
        self,
        objective: GRPOObjective,
        batch: GRPOBatch,
        selected: Tensor,
        logps_of: Callable[..., tuple[Tensor, Tensor | None]],
        with_entropies: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of the policy `[B, T]`, with the forecast of their gradients."""
        expected = forecast(objective, batch) if torch.is_grad_enabled() else None
        positions, grad_rows = grad_rows_first(selected, None if expected is None else expected.needs_grad)  # [N]
        return logps_of(
            positions,
            forecast=None if expected is None else expected.at(positions, grad_rows),
            backward=self.backward,
            entropy=with_entropies or objective.top_entropy_quantile < 1.0,
            entropy_grad=objective.entropy_coef != 0.0,
            stats=self.stats,
        )

    @staticmethod
    def _outputs(
        objective: GRPOObjective, batch: GRPOBatch, logps: Tensor, entropies: Tensor | None, return_outputs: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]] | GRPOLossOutput:
        terms = token_terms(objective, batch, logps, entropies)
        loss = reduce_loss(objective, batch, terms.loss, entropies)
        metrics = named_metrics(objective, batch, terms, entropies)
        if return_outputs and entropies is not None:
            return GRPOLossOutput(loss, logps.detach(), entropies.detach(), metrics)
        return loss, tuple(
            metrics[name] for name in ("kl", "cispo_clip_ratio", "clip_ratio/region_mean") if name in metrics
        )
