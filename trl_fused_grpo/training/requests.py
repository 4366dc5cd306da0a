"""
What is asked of a log-prob computation and what comes back. And what a loss asks for: which positions it projects, and
the gradients that it expects back.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS
from trl_fused_grpo.loss.batch import GRPOBatch, as_columns
from trl_fused_grpo.loss.forecast import BatchForecast, forecast
from trl_fused_grpo.loss.importance_sampling import SamplingCorrection
from trl_fused_grpo.loss.objective import GRPOObjective, rloo_objective, token_terms
from trl_fused_grpo.loss.reduction import luspo_counts_padding, token_weights
from trl_fused_grpo.modeling.head.output_projection import LogitScaling
from trl_fused_grpo.ops.linear_logps import FusedStats
from trl_fused_grpo.options import FusedOptions

from .findings import replaced_objective


_TEXT_ARGUMENTS = ("model", "input_ids", "attention_mask", "logits_to_keep")


@dataclass(frozen=True)
class LogpsRequest:
    """Which positions of a batch get a log-probability, and which gradients are expected there."""

    mask: Tensor  # [B, T]: the positions whose log-probability is read
    fill: Tensor | None = None  # [B, T], nats: stands at all other positions. Zero by default
    forecast: BatchForecast | None = None
    entropy_grad: bool = False  # whether entropies will receive a gradient
    skippable: Tensor | None = None  # [B], bool
    micro_batch: int | None = None  # sequences in each of the micro-batches that are joined here
    head_grad: bool | None = None  # of a reference, whether the policy's head has a gradient

    @classmethod
    def joined(cls, parts: list["LogpsRequest"]) -> "LogpsRequest":
        """One request for several micro-batches of an accumulation window. They differ in their tensors only."""
        if len(parts) == 1:
            return parts[0]
        fills = [part.fill for part in parts if part.fill is not None]
        skippable = [part.skippable for part in parts if part.skippable is not None]
        forecasts: list[Any] = [part.forecast for part in parts if part.forecast is not None]
        return replace(
            parts[0],
            mask=torch.cat([part.mask for part in parts]),
            fill=torch.cat(fills) if fills else None,
            forecast=type(forecasts[0]).joined(forecasts) if forecasts else None,
            skippable=torch.cat(skippable) if skippable else None,
            micro_batch=len(parts[0].mask),
        )


@dataclass(frozen=True)
class LogpsArgs:
    """The arguments of TRL's `_get_per_token_logps_and_entropies`, under its names."""

    model: nn.Module  # in all its wrappers. It takes the keyword `fused`
    input_ids: Tensor  # [B, P + T], prompts padded left and completions right
    attention_mask: Tensor  # [B, P + T]
    logits_to_keep: int  # T
    batch_size: int | None  # sequences in a sub-batch. All in one by default
    compute_entropy: bool
    compute_aux_loss: bool
    multimodal: dict[str, Any]  # pixels and what belongs to them. Empty for text

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "LogpsArgs":
        """The arguments of a call, by position in the order of the installed TRL, and by name."""
        names = trl_compat.LOGPS_ARGUMENTS[: len(args)]
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        flags = {"batch_size": None, "compute_entropy": False, "compute_aux_loss": False}
        own = {name: values.pop(name, flags.get(name)) for name in (*_TEXT_ARGUMENTS, *flags)}
        return cls(**own, multimodal={name: value for name, value in values.items() if value is not None})

    @property
    def completion_ids(self) -> Tensor:
        """`[B, T]`."""
        return self.input_ids[:, -self.logits_to_keep :]

    def with_batches(self, micro_batches: list[dict[str, Any]]) -> "LogpsArgs":
        """The same arguments for the sequences of several micro-batches, one after the other."""
        ids, mask = (torch.cat(tensors) for tensors in zip(*map(prompts_and_completions, micro_batches), strict=True))
        images = {name: _joined([batch[name] for batch in micro_batches]) for name in self.multimodal}
        width = micro_batches[0]["completion_ids"].shape[1]
        return replace(self, input_ids=ids, attention_mask=mask, logits_to_keep=width, multimodal=images)


def _joined(values: list[Any]) -> Any:
    """Join one input of the images of several micro-batches: tensors with a row for each of something, or lists."""
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return [item for of_batch in values for item in of_batch]


def images_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the images of a micro-batch, under TRL's names; empty for text."""
    return {name: inputs[name] for name in MULTIMODAL_INPUTS if inputs.get(name) is not None}


def can_join_images(micro_batches: list[dict[str, Any]]) -> bool:
    """Return `True` if what belongs to the images of several micro-batches, if there are any, can be joined."""
    first, *others = map(images_of, micro_batches)
    for other in others:
        if other.keys() != first.keys():
            return False
        for name, value in first.items():
            if type(other[name]) is not type(value) or not isinstance(value, (Tensor, list)):
                return False
            if isinstance(value, Tensor) and other[name].shape[1:] != value.shape[1:]:
                return False
    return True


@dataclass
class LossCall:
    """A call of TRL's own `_compute_loss`."""

    micro_batch: dict[str, Any]  # as TRL keeps it for later iterations
    # What TRL reads, a copy: what is added goes into the micro-batch only where generation left it to the training
    inputs: dict[str, Any]
    logps: Tensor | None = None  # the log-probs `[B, T]` that TRL got


def prompts_and_completions(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask `[B, P + T]` of a micro-batch."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask


@dataclass(frozen=True)
class LogpsOptions:
    """How rows are laid out and how the output projection runs."""

    causal_lm: PreTrainedModel  # the causal language model inside the wrappers of the model
    scaling: LogitScaling  # of the logits
    temperature: float  # of the sampler
    fp32: bool  # whether the output projection runs in float32
    fused: FusedOptions
    packed: bool  # whether rows are packed; otherwise they have TRL's padding
    share_prompts: bool  # whether a prompt stands in a packed row once
    compiled: list[tuple[int, Any]]  # the layers that run compiled, each with its number in the model
    is_known: bool = True  # whether the model's code is a library's. Other code runs as in stock
    opens_masks: bool = False  # whether what attention returns at TRL's padding may be anything


@dataclass
class PerTokenLogps:
    """The log-probabilities of a batch, and what was computed with them."""

    logps: Tensor  # [B, T], nats
    entropies: Tensor | None  # [B, T], nats
    aux_loss: Tensor | None  # the load-balancing loss of a Mixture-of-Experts model, a scalar
    stats: list[FusedStats] = field(default_factory=list)  # of each sub-batch
    left_out: Tensor | None = None  # [B], bool: sequences that were left out of the model

    def split(self, sizes: list[int]) -> list["PerTokenLogps"]:
        """The result for several micro-batches as those of each. The first one gets the statistics."""
        none = [None] * len(sizes)
        entropies, left_out = (
            none if of_all is None else of_all.split(sizes) for of_all in (self.entropies, self.left_out)
        )
        parts = zip(self.logps.split(sizes), entropies, left_out, strict=True)
        return [
            PerTokenLogps(logps, entropy, self.aux_loss, [] if i else self.stats, out)
            for i, (logps, entropy, out) in enumerate(parts)
        ]


# What a loss asks for


# Marks micro-batches whose old log-probs, and what follows from them, generation left to the training
DEFERRED = "old_logps_from_training"
# Options of the objective that stand in the arguments. Older TRL has fewer
_OPTIONS_IN_ARGS = (
    "delta",
    "use_bias_correction_kl",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def padding_counts(trainer: GRPOTrainer) -> bool:
    """Return `True` if TRL's objective reads padding positions too, see [`luspo_counts_padding`]."""
    if not trl_compat.LUSPO_COUNTS_PADDING:
        return False
    objective = objective_of(trainer)
    has_token_factors = trainer.use_vllm or objective.top_entropy_quantile < 1.0
    return luspo_counts_padding(objective, objective.beta != 0.0, has_token_factors)


def objective_of(trainer: GRPOTrainer, entropy_coef: float = 0.0, kl_estimator: str = "k3") -> GRPOObjective:
    """The trainer's objective as plain options."""
    if trainers.is_rloo(trainer):
        return rloo_objective(trainer.epsilon_low, trainer.epsilon_high)
    return GRPOObjective(
        loss_type=trainer.loss_type,
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        beta=trainers.beta_of_loss(trainer),
        top_entropy_quantile=trainer.top_entropy_quantile,
        kl_estimator=kl_estimator,
        importance_sampling_level=trainer.importance_sampling_level,
        entropy_coef=entropy_coef,
        max_completion_length=trainer.max_completion_length,
        off_policy_mask_threshold=trainer.off_policy_mask_threshold,
        **{name: getattr(trainer.args, name) for name in _OPTIONS_IN_ARGS if hasattr(trainer.args, name)},
    )


def batch_of(trainer: Any, inputs: dict[str, Any], objective: GRPOObjective, accumulation: float) -> GRPOBatch:
    """A micro-batch as TRL's loss reads it, without vLLM's ratio and the entropy bonus."""
    is_global = objective.uses_global_normalizer
    return GRPOBatch(
        mask=trl_compat.loss_mask(trainer, inputs),
        advantages=as_columns(inputs["advantages"]),
        old_per_token_logps=inputs.get("old_per_token_logps"),
        ref_per_token_logps=inputs.get("ref_per_token_logps"),
        normalizer=trl_compat.global_normalizer(trainer, inputs) if is_global else None,
        accumulation=1.0 if is_global else accumulation,
    )


def build_loss_request(
    trainer: Any,  # whose objective it is
    inputs: dict[str, Any],  # the micro-batch as TRL's `_compute_loss` gets it
    skip_zero_grad: bool,  # whether sequences that can receive no gradient may be left out
    correction: SamplingCorrection | None = None,  # vLLM's, where the ratio comes from the training forward
    kl_estimator: str = "k3",
) -> LogpsRequest:
    """Decide which positions of a micro-batch to project for the loss, and forecast their gradients."""
    if trainers.is_rloo(trainer):
        return build_rloo_request(trainer, inputs, skip_zero_grad)
    old_logps = inputs.get("old_per_token_logps")
    entropy_coef = _entropy_coef_in_force(trainer)
    if padding_counts(trainer):
        every_position = torch.ones_like(inputs["completion_mask"])
        return LogpsRequest(every_position, entropy_grad=entropy_coef != 0.0)
    if not torch.is_grad_enabled():
        return LogpsRequest(trl_compat.loss_mask(trainer, inputs), fill=old_logps)

    objective = objective_of(trainer, entropy_coef, kl_estimator)
    batch = batch_of(trainer, inputs, objective, trainer.current_gradient_accumulation_steps)
    mask, has_ratio = batch.mask, trainers.corrects_sampling(trainer)
    deferred = DEFERRED in inputs and has_ratio
    ratio = inputs["importance_sampling_ratio"] if has_ratio and not deferred else None
    batch = replace(
        batch,
        importance_sampling_ratio=None if ratio is None else as_columns(ratio),
        entropy_normalizer=trl_compat.entropy_normalizer(trainer, mask, batch.normalizer) if entropy_coef else None,
        sampling_per_token_logps=inputs.get("sampling_per_token_logps"),
    )
    expected = forecast(objective, batch, correction if deferred else None)
    skippable = _skippable(inputs, objective) if skip_zero_grad else None
    # Sequences that are left out have the sampler's log-probs then, and so a ratio of one
    is_filled = deferred and skippable is not None
    fill = inputs["sampling_per_token_logps"].nan_to_num() if is_filled else old_logps
    return LogpsRequest(mask, fill, expected, entropy_grad=entropy_coef != 0.0, skippable=skippable)


def _skippable(inputs: dict[str, Any], objective: GRPOObjective) -> torch.Tensor | None:
    """The sequences `[B]` of a micro-batch that may be left out of the model, as far as TRL's metrics are concerned."""
    is_zero = as_columns(inputs["advantages"] == 0).all(1)  # [B]
    if inputs.get("old_per_token_logps") is None and DEFERRED not in inputs:
        return torch.ones_like(is_zero)  # on-policy nothing is clipped, and every weight is known
    # Of ratios to the old policy vespo logs a weight of every sequence, the others what is clipped: of advantages that
    # are not zero, also where vLLM's ratio leaves them no gradient
    return None if objective.loss_type == "vespo" else is_zero


def _entropy_coef_in_force(trainer: GRPOTrainer) -> float:
    """Coefficient of the entropy bonus in this step. TRL's adaptive bonus is off above its target."""
    if not trl_compat.has_entropy_bonus(trainer):
        return 0.0
    args: Any = trainer.args
    is_off = trainer.use_adaptive_entropy and trl_compat.last_entropy(trainer) > args.entropy_target
    return 0.0 if is_off else trainer.entropy_coef


def build_rloo_request(trainer: Any, inputs: dict[str, Any], skip_zero_grad: bool) -> LogpsRequest:
    """Decide which positions of a micro-batch to project for RLOO's loss, and forecast their gradients."""
    mask = inputs["completion_mask"]  # [B, T]
    if not torch.is_grad_enabled():
        return LogpsRequest(mask)
    old_logps = None if DEFERRED in inputs else inputs["old_logps"]  # [B]
    fill, batch = None, GRPOBatch(mask, as_columns(inputs["advantages"]))
    if old_logps is not None:  # sequences that are left out then have a ratio of one
        batch = replace(batch, old_per_token_logps=as_columns(old_logps))
        fill = old_logps.unsqueeze(1) * mask / mask.sum(1, keepdim=True).clamp(min=1)  # [B, T]
    expected = forecast(objective_of(trainer), batch)
    skippable = torch.ones_like(mask[:, 0], dtype=torch.bool) if skip_zero_grad else None
    return LogpsRequest(mask, fill, expected, skippable=skippable)


# A KL estimator other than TRL's `"k3"`. TRL computes its loss with `beta=0.0`, and `kl_term` is added to it. A token's
# KL has the weight that TRL gives it


def replaces_kl(trainer: GRPOTrainer, name: str) -> bool:
    """
    Return `True` if the KL term with the estimator `name` is computed here instead of by TRL. Raise where the user's
    objective would not have it.
    """
    if trainers.beta_of_loss(trainer) == 0.0 or name == "k3":
        return False
    method = replaced_objective(trainer)
    if method is not None:
        raise ValueError(
            f"kl_estimator={name!r} does not reach {method}, which computes its KL term itself: set kl_estimator='k3'."
        )
    return True


def estimator_in_force(objective: GRPOObjective) -> str:
    """The estimator that is computed, by the name under which it is logged: `k1` times the importance ratio is `k4`."""
    name = objective.kl_estimator
    if name in ("k1", "k4"):
        return "k4" if objective.weighs_kl else "k1"
    return f"{name}_bias_corrected" if objective.weighs_kl else name


def kl_term(trainer: Any, inputs: dict[str, Any], logps: Tensor, name: str) -> Tensor:
    """
    `beta` times the KL divergence of a micro-batch by the estimator `name`, aggregated as TRL aggregates its loss; a
    scalar. Logs the mean over tokens, in nats, under the estimator's name.
    """
    objective = objective_of(trainer, kl_estimator=name)
    if padding_counts(trainer):
        objective = replace(objective, reduction="padded_sequence_sum")
    is_training = trainer.model.training
    batch = batch_of(trainer, inputs, objective, trainer.current_gradient_accumulation_steps if is_training else 1.0)
    # Only the KL term is used: what masks the policy term does not matter
    kl = token_terms(replace(objective, off_policy_mask_threshold=None, top_entropy_quantile=1.0), batch, logps).kl
    assert kl is not None, "beta is not zero"
    sums = torch.stack([(kl.detach() * batch.mask).sum(), batch.mask.sum()])
    total, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    metrics = trl_compat.metrics_of(trainer, "train" if is_training else "eval")
    metrics[f"kl/{estimator_in_force(objective)}"].append(total / max(count, 1.0))
    return objective.beta * (kl * token_weights(objective, batch)).sum()
