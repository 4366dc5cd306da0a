"""What is asked of a log-prob computation and what comes back: request, arguments, options, result."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS
from trl_fused_grpo.loss.deferred_forecast import DeferredForecast
from trl_fused_grpo.loss.forecast import BatchForecast
from trl_fused_grpo.loss.sequence_forecast import SequenceForecast
from trl_fused_grpo.modeling.head.output_projection import LogitScaling
from trl_fused_grpo.ops.linear_logps import FusedStats


_TEXT_ARGUMENTS = ("model", "input_ids", "attention_mask", "logits_to_keep")


@dataclass(frozen=True)
class LogpsRequest:
    """
    Which positions of a batch get a log-probability, and which gradients are expected there.

    Args:
        mask (`Tensor`): `[B, T]`: the positions whose log-probability is read.
        fill (`Tensor`, *optional*): `[B, T]`, nats: stands at all other positions. Zero by default.
        forecast ([`BatchForecast`], [`DeferredForecast`] or [`SequenceForecast`], *optional*):
            The gradients that the backward is expected to bring.
        entropy_grad (`bool`): whether entropies will receive a gradient.
        skippable (`Tensor`, *optional*):
            `[B]`, bool: the sequences that are left out of the model if they can receive no gradient.
        reads_padding (`bool`): whether TRL's objective reads padding, so that every row keeps it.
        micro_batch (`int`, *optional*): sequences in each of the micro-batches that are joined here.
        head_grad (`bool`, *optional*): of a reference, whether the policy's head has a gradient.
    """

    mask: Tensor
    fill: Tensor | None = None
    forecast: BatchForecast | DeferredForecast | SequenceForecast | None = None
    entropy_grad: bool = False
    skippable: Tensor | None = None
    reads_padding: bool = False
    micro_batch: int | None = None
    head_grad: bool | None = None

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
    """
    The arguments of TRL's `_get_per_token_logps_and_entropies`, under its names.

    Args:
        model (`nn.Module`): in all its wrappers. It takes the keyword `fused`.
        input_ids, attention_mask (`Tensor`): `[B, P + T]`, prompts padded left and completions right.
        logits_to_keep (`int`): `T`.
        batch_size (`int`, *optional*): sequences in a sub-batch. All in one by default.
        compute_entropy, compute_aux_loss (`bool`): what to compute beside log-probabilities.
        multimodal (`dict`): pixels and what belongs to them. Empty for text.
    """

    model: nn.Module
    input_ids: Tensor
    attention_mask: Tensor
    logits_to_keep: int
    batch_size: int | None
    compute_entropy: bool
    compute_aux_loss: bool
    multimodal: dict[str, Any]

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

    def as_micro_batches(self, size: int | None) -> list[dict[str, Any]]:
        """Ids of prompts, their mask and that of completions for each `size` sequences; by default all together."""
        length, ids, mask = self.logits_to_keep, self.input_ids, self.attention_mask
        parts = ids[:, :-length], mask[:, :-length], mask[:, -length:]
        split = (part.split(len(ids) if size is None else size) for part in parts)
        names = ("prompt_ids", "prompt_mask", "completion_mask")
        return [dict(zip(names, values, strict=True)) for values in zip(*split, strict=True)]

    def with_batches(self, micro_batches: list[dict[str, Any]]) -> "LogpsArgs":
        """The same arguments for the sequences of several micro-batches, one after the other."""
        ids, mask = (torch.cat(tensors) for tensors in zip(*map(prompts_and_completions, micro_batches), strict=True))
        images = {name: _joined([batch[name] for batch in micro_batches]) for name in self.multimodal}
        width = micro_batches[0]["completion_ids"].shape[1]
        return replace(self, input_ids=ids, attention_mask=mask, logits_to_keep=width, multimodal=images)


def _joined(values: list[Any]) -> Any:
    """What belongs to the images of several micro-batches: tensors with a row for each of something, and lists."""
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return [item for of_batch in values for item in of_batch]


def images_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """What belongs to the images of a micro-batch, under TRL's names; empty for text."""
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
    """
    A call of TRL's own `_compute_loss`.

    Args:
        micro_batch (`dict`): as TRL keeps it for later iterations.
        inputs (`dict`): what TRL reads, a copy: what is added for TRL goes into the micro-batch only where generation
            left it to the training forward.
        beta (`float`): coefficient of the KL term, also while TRL's own KL term is left out.
        logps (`Tensor`, *optional*): the log-probs `[B, T]` that TRL got.
    """

    micro_batch: dict[str, Any]
    inputs: dict[str, Any]
    beta: float
    logps: Tensor | None = None


def prompts_and_completions(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask `[B, P + T]` of a micro-batch."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask


@dataclass(frozen=True)
class LogpsOptions:
    """
    How rows are laid out and how the output projection runs.

    Args:
        causal_lm (`PreTrainedModel`): the causal language model inside the wrappers of the model.
        scaling ([`LogitScaling`]): of the logits.
        temperature (`float`): of the sampler.
        fp32 (`bool`): whether the output projection runs in float32.
        backward (`str`): `fused_backward` of [`FusedGRPOConfig`].
        logits_mib (`float`, *optional*): memory for one chunk of logits, in MiB.
        packed (`bool`): whether rows are packed; otherwise they have TRL's padding.
        share_prompts (`bool`): whether a prompt stands in a packed row once.
        forces_rows (`bool`): whether packed rows were asked for, so that no padded ones may stand in for them.
        needs_last_column (`bool`): see [`layout_choice.Traits`].
        is_known (`bool`): whether the model's code is a library's. Other code runs as in stock.
        opens_masks (`bool`): whether what attention returns at TRL's padding may be anything.
    """

    causal_lm: PreTrainedModel
    scaling: LogitScaling
    temperature: float
    fp32: bool
    backward: str
    logits_mib: float | None
    packed: bool
    share_prompts: bool
    forces_rows: bool = False
    needs_last_column: bool = False
    is_known: bool = True
    opens_masks: bool = False


@dataclass
class PerTokenLogps:
    """
    The log-probabilities of a batch, and what was computed with them.

    Args:
        logps (`Tensor`): `[B, T]`, nats.
        entropies (`Tensor`, *optional*): `[B, T]`, nats.
        aux_loss (`Tensor`, *optional*): the load-balancing loss of a Mixture-of-Experts model, a scalar.
        stats (`list[FusedStats]`): of each sub-batch.
        left_out (`Tensor`, *optional*): `[B]`, bool: sequences that were left out of the model.
    """

    logps: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None
    stats: list[FusedStats] = field(default_factory=list)
    left_out: Tensor | None = None

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
