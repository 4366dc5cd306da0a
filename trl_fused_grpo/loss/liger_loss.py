"""`FusedLinearGRPOLoss`: the extended chunked Liger loss, for the trainer and for loops of one's own."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from torch import Tensor, nn

from trl_fused_grpo.ops.linear_logps import FusedStats, fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead

from .batch import GRPOBatch, as_columns, check_shapes, zero_masked
from .forecast import BatchForecast, forecast, grad_rows_first
from .metrics import GRPOLossOutput, named_metrics
from .objective import GRPOObjective, token_terms
from .reduction import luspo_counts_padding, reduce_loss, tokens_per_process


class FusedLinearGRPOLoss(LigerFusedLinearGRPOLoss):
    """
    Drop-in for Liger's `LigerFusedLinearGRPOLoss`: the arguments of release 0.8.5 whichever release is installed, the
    same loss and metrics, fewer GEMMs (see [`fused_linear_logps`]), and further options.

    Args:
        beta, use_ref_model, epsilon_low, epsilon_high, loss_type, max_completion_length, importance_sampling_level,
        sapo_temperature_pos, sapo_temperature_neg, temperature, delta, use_bias_correction_kl, vespo_k_pos,
        vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg:
            As in Liger.
        compiled, chunk_size:
            Accepted and without effect: nothing is compiled, and `logits_mib` sets the size of a chunk.
        off_policy_mask_threshold (`float`, *optional*):
            Drop sequences of negative advantage that the policy has left by more than this, in nats per token.
        top_entropy_quantile (`float`, *optional*, defaults to `1.0`):
            Fraction of the call's tokens, those of highest entropy, that the policy term acts on.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the entropy bonus.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            `"k1"`, `"k2"`, `"k3"` or `"k4"`, see [`~objective.kl_loss`].
        reduction (`str`, *optional*):
            `"token_mean"`, `"sequence_mean"`, `"fixed_length"` or `"sequence_sum"`, see [`~reduction.token_weights`].
            Defaults to the loss type's own.
        backward, logits_mib:
            As in [`fused_linear_logps`].

    `stats` tells what the last call did, see [`FusedStats`].
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
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        off_policy_mask_threshold: float | None = None,
        top_entropy_quantile: float = 1.0,
        entropy_coef: float = 0.0,
        kl_estimator: str = "k3",
        reduction: str | None = None,
        backward: str = "auto",
        logits_mib: float | None = None,
    ):
        options = {name: value for name, value in vars().items() if name != "self"}
        nn.Module.__init__(self)  # Liger's own takes fewer arguments in older releases
        # Plain attributes under the arguments' names, as in Liger, where code that uses it sets them
        vars(self).update(options)
        self.stats = FusedStats()
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @classmethod
    def from_objective(cls, objective: GRPOObjective, **options: Any) -> "FusedLinearGRPOLoss":
        """The loss of an objective; `options` are further arguments of the constructor."""
        return cls(**asdict(objective), **options)

    @property
    def objective(self) -> GRPOObjective:
        """The objective that the attributes describe at this moment."""
        return GRPOObjective(**{field.name: getattr(self, field.name) for field in fields(GRPOObjective)})

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
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
                Hidden states `[B, T, H]`, each the one that predicts the token at its place.
            lin_weight, bias (`Tensor`):
                The head: `[V, H]` and, optional, `[V]`.
            selected_token_ids (`Tensor`):
                `[B, T]`, int64. Where the mask is zero they may be anything.
            attention_mask (`Tensor`):
                Loss mask `[B, T]`. Only tokens that count are projected.
            advantages (`Tensor`):
                `[B]`, `[B, 1]` or `[B, T]`.
            ref_per_token_logps, old_per_token_logps (`Tensor`, *optional*):
                `[B, T]`, nats. Without old ones the policy is the old policy.
            ref_input, ref_weight, ref_bias (`Tensor`, *optional*):
                Hidden states and head of the reference, in place of its log-probabilities.
            vllm_is_ratio (`Tensor`, *optional*):
                Ratio of policy and sampler, `[B]`, `[B, 1]` or `[B, T]`.
            num_items_in_batch (`Tensor` or `float`, *optional*):
                Tokens of the optimizer step over all processes, for DAPO, CISPO and VESPO.
            normalizer (`Tensor` or `float`, *optional*):
                What the loss divides by in place of this call's count of tokens or, by reduction, sequences.
            entropy_normalizer (`Tensor` or `float`, *optional*):
                What the entropy bonus divides by in place of this call's count of tokens.
            sampling_per_token_logps (`Tensor`, *optional*):
                The sampler's `[B, T]`, for the off-policy sequence mask. Defaults to the old ones.
            temperature (`Tensor`, *optional*):
                Sampling temperature of each sequence or token: `[B]`, `[B, 1]` or `[B, T]`.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Whether to return a [`GRPOLossOutput`].

        Returns:
            `tuple[Tensor, tuple[Tensor, ...]]`:
                The loss, and as metrics the KL divergence (only if `beta` is not zero) and the fraction of clipped
                tokens, as Liger has it.

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
        counted = mask != 0
        if self._padding_counts(objective, vllm_is_ratio):
            objective = replace(objective, reduction="padded_sequence_sum")
            counted = torch.ones_like(counted)
        if normalizer is None and objective.uses_global_normalizer:
            normalizer = tokens_per_process(mask, num_items_in_batch)
        score = partial(self._score, selected_token_ids, self.temperature if temperature is None else temperature)
        ref_per_token_logps = self._reference(ref_per_token_logps, ref_input, ref_weight, ref_bias, counted, score)
        batch = GRPOBatch(
            mask=mask,
            advantages=zero_masked(advantages, counted),
            old_per_token_logps=zero_masked(old_per_token_logps, counted),
            ref_per_token_logps=zero_masked(ref_per_token_logps, counted),
            importance_sampling_ratio=zero_masked(vllm_is_ratio, counted | (objective.loss_type == "vespo")),
            sampling_per_token_logps=zero_masked(sampling_per_token_logps, counted),
            normalizer=normalizer,
            entropy_normalizer=entropy_normalizer,
        )
        expected = forecast(objective, batch) if torch.is_grad_enabled() else None
        positions, grad_rows = grad_rows_first(counted, None if expected is None else expected.needs_grad)  # [N]
        logps, entropies = score(
            _input,
            LMHead(lin_weight, bias),
            positions,
            forecast=None if expected is None else expected.at(positions, grad_rows),
            backward=self.backward,
            entropy=return_outputs or objective.top_entropy_quantile < 1.0,
            entropy_grad=objective.entropy_coef != 0.0,
            stats=self.stats,
        )
        terms = token_terms(objective, batch, logps, entropies)
        loss = reduce_loss(objective, batch, terms.loss, entropies)
        metrics = named_metrics(objective, batch, terms, entropies)
        if return_outputs and entropies is not None:
            return GRPOLossOutput(loss, logps.detach(), entropies.detach(), metrics)
        return loss, tuple(metrics[name] for name in ("kl", "clip_ratio/region_mean") if name in metrics)

    def _padding_counts(self, objective: GRPOObjective, ratio: Tensor | None) -> bool:
        """Whether padding counts, as in Liger's LUSPO."""
        has_kl = self.use_ref_model and objective.beta != 0.0
        return luspo_counts_padding(objective, has_kl, ratio is not None and ratio[0].numel() > 1)

    def _score(
        self,
        token_ids: Tensor,
        temperature: float | Tensor,
        hidden: Tensor,
        head: LMHead,
        positions: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies `[B, T]`, zero but at the flat `positions`."""
        if isinstance(temperature, Tensor):
            temperature = as_columns(temperature).expand(token_ids.shape).flatten().index_select(0, positions)  # [N]
        rows = hidden.flatten(0, -2)  # [B * T, H]
        forecast = options.get("forecast")
        is_sorted = forecast is None or forecast.grad_rows in (0, len(positions))
        if len(positions) < len(rows) or not is_sorted:  # no copy where every row is taken as it comes
            rows = rows.index_select(0, positions)  # [N, H]
        targets = token_ids.flatten().index_select(0, positions)  # [N]
        logps, entropies = fused_linear_logps(rows, head, targets, temperature, logits_mib=self.logits_mib, **options)

        def in_place(value: Tensor) -> Tensor:
            return value.new_zeros(token_ids.numel()).index_put((positions,), value).view(token_ids.shape)

        return in_place(logps), None if entropies is None else in_place(entropies)

    @torch.no_grad()
    def _reference(
        self,
        logps: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        counted: Tensor,
        score: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> Tensor | None:
        """Log-probabilities of the reference `[B, T]`, or `None` where the policy is its own."""
        if not self.use_ref_model or self.beta == 0.0:
            return None
        if logps is not None:
            if hidden is not None:
                warnings.warn(
                    "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.", stacklevel=3
                )
            return logps
        if hidden is None or weight is None:
            raise ValueError("use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight.")
        positions, _ = grad_rows_first(counted, None)
        return score(hidden, LMHead(weight, bias), positions, entropy=False)[0]

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
        Forecast the gradient of every token of a micro-batch of TRL's; `None` where the objective allows none.

        Args:
            mask (`Tensor`): `[B, T]`, the completion mask times the tool mask.
            advantages (`Tensor`): `[B]`, `[B, 1]` or `[B, T]`.
            old_per_token_logps, ref_per_token_logps (`Tensor`, *optional*): `[B, T]`, nats.
            vllm_is_ratio (`Tensor`, *optional*): `[B, T]` or `[B, 1]`.
            normalizer (`Tensor` or `float`): tokens of the accumulation window per process, for DAPO, CISPO and VESPO.
            accumulation (`float`): gradient accumulation steps, for the others.
            entropy_normalizer (`Tensor` or `float`, *optional*): divisor of the entropy bonus.
        """
        uses_global_normalizer = self.objective.uses_global_normalizer
        batch = GRPOBatch(
            mask=mask,
            advantages=as_columns(advantages),
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_sampling_ratio=vllm_is_ratio,
            normalizer=normalizer if uses_global_normalizer else None,
            accumulation=1.0 if uses_global_normalizer else accumulation,
            entropy_normalizer=entropy_normalizer,
        )
        return forecast(self.objective, batch)
