"""Losses, masks and inputs that a user computes: methods for [`methods.subclass`] and its like."""

from typing import Any

import torch

from trl_fused_grpo.parity.case import Trainer

from .methods import Method


def _log_probs(trainer: Trainer, model: Any, inputs: dict[str, Any], **changed: Any) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and mask `[B, T]` of a micro-batch, with entries `changed`."""
    batch = {**inputs, **changed}
    mask = batch["completion_mask"]
    logps, entropies, *_ = trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], mask], dim=1),
        mask.size(1),
        compute_entropy=True,
    )
    return logps, entropies, mask


def _policy_loss(logps: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logps - logps.detach())
    return -(ratio * advantages.view(len(mask), -1) * mask).sum() / mask.sum().clamp(min=1)


def own_loss(cls: Any) -> dict[str, Method]:
    def _compute_loss(self, model, inputs):
        logps, entropies, mask = _log_probs(self, model, inputs)
        self._metrics["train"]["own/entropy"].append(float((entropies * mask).sum() / mask.sum()))
        return _policy_loss(logps, mask, inputs["advantages"]) / self.current_gradient_accumulation_steps

    return {"_compute_loss": _compute_loss}


def own_loss_entropy(cls: Any) -> dict[str, Method]:
    def _compute_loss(self, model, inputs):
        logps, entropies, mask = _log_probs(self, model, inputs)
        self.seen.append(str(entropies.requires_grad))
        loss = _policy_loss(logps, mask, inputs["advantages"])
        return (loss - 0.3 * (entropies * mask).sum() / mask.sum()) / self.current_gradient_accumulation_steps

    return {"_compute_loss": _compute_loss}


def contrastive_loss(cls: Any) -> dict[str, Method]:
    def _compute_loss(self, model, inputs):
        logps, _, mask = _log_probs(self, model, inputs)
        others = {name: inputs[name].roll(1, 0) for name in ("completion_ids", "completion_mask")}
        other_logps, _, other_mask = _log_probs(self, model, inputs, **others)
        margin = (logps * mask).sum(1) - (other_logps * other_mask).sum(1)
        loss = _policy_loss(logps, mask, inputs["advantages"])
        return (loss - 0.3 * torch.nn.functional.logsigmoid(margin).mean()) / self.current_gradient_accumulation_steps

    return {"_compute_loss": _compute_loss}


def contrastive_loss_first(cls: Any) -> dict[str, Method]:
    def _compute_loss(self, model, inputs):
        others = {name: inputs[name].flip(0) for name in ("completion_ids", "completion_mask")}
        other_logps, _, other_mask = _log_probs(self, model, inputs, **others)
        loss = cls._compute_loss(self, model, inputs)
        return loss + 0.003 * (other_logps * other_mask).sum() / self.current_gradient_accumulation_steps

    return {"_compute_loss": _compute_loss}


def loss_twice(cls: Any) -> dict[str, Method]:
    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"].clone()
        mask[:, 4:] = 0
        other = {**inputs, "completion_mask": mask, "advantages": inputs["advantages"].flip(0)}
        return cls._compute_loss(self, model, inputs) + 0.5 * cls._compute_loss(self, model, other)

    return {"_compute_loss": _compute_loss}


def loss_plus(cls: Any) -> dict[str, Method]:
    """Twice TRL's loss, of other advantages."""

    def _compute_loss(self, model, inputs):
        inputs = {**inputs, "advantages": inputs["advantages"] - 0.4}
        return 2 * cls._compute_loss(self, model, inputs)

    return {"_compute_loss": _compute_loss}


def entropy_mask(cls: Any) -> dict[str, Method]:
    def get_high_entropy_mask(self, entropies, mask, threshold):
        self.seen.append(float((entropies * mask).sum()))
        return (torch.arange(mask.size(1), device=mask.device) % 2 == 0) & mask.bool()

    return {"get_high_entropy_mask": get_high_entropy_mask}


def off_policy_mask(cls: Any) -> dict[str, Any]:
    def get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold):
        keep = torch.arange(len(mask), device=mask.device) % 3 != 1
        return keep.unsqueeze(1).to(per_token_logps.dtype)

    return {"get_off_policy_mask": staticmethod(get_off_policy_mask)}


def _per_token(inputs: dict[str, Any]) -> list[str]:
    width = inputs["completion_ids"].size(1)
    return [name for name, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() == 2 and v.size(1) == width]


def inputs_trimmed(cls: Any) -> dict[str, Method]:
    """Trims padding in place, while other micro-batches of the generation batch keep theirs."""

    def _prepare_inputs(self, *args, **kwargs):
        inputs = cls._prepare_inputs(self, *args, **kwargs)
        width = int(inputs["completion_mask"].sum(1).max())
        for name in [name for name in _per_token(inputs) if name not in ("prompt_ids", "prompt_mask")]:
            inputs[name] = inputs[name][:, :width]
        return inputs

    return {"_prepare_inputs": _prepare_inputs}


def inputs_epsilon(cls: Any) -> dict[str, Method]:
    def _prepare_inputs(self, *args, **kwargs):
        self.epsilon_low = self.epsilon_high = (0.001, 0.5)[self._step % 2]
        return cls._prepare_inputs(self, *args, **kwargs)

    return {"_prepare_inputs": _prepare_inputs}


def inputs_weighted(cls: Any) -> dict[str, Method]:
    def _prepare_inputs(self, *args, **kwargs):
        inputs = cls._prepare_inputs(self, *args, **kwargs)
        return {**inputs, "advantages": inputs["advantages"] * (1 + self._step % 2)}

    return {"_prepare_inputs": _prepare_inputs}


def generation_replayed(cls: Any) -> dict[str, Method]:
    """Every second completion comes from the generation before, with the old log-probs that it had then."""

    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        if not self.model.training:
            return output
        before = getattr(self, "replayed", None)
        self.replayed = {n: v.clone() for n, v in output.items() if isinstance(v, torch.Tensor) and v.dim()}
        if before is not None:
            for name, value in before.items():
                output[name][::2] = value[::2]
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}


def generation_read(cls: Any) -> dict[str, Method]:
    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        for name in ("old_per_token_logps", "importance_sampling_ratio"):
            self.seen.append(float(output[name].sum()) if name in output else f"no {name}")
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}


def generation_holes(cls: Any) -> dict[str, Method]:
    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        output["completion_mask"] = output["completion_mask"].clone()
        output["completion_mask"][::2, 2] = 0
        output["completion_mask"][1::2, 0] = 0
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}


def generation_prompt_hole(cls: Any) -> dict[str, Method]:
    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        output["prompt_mask"] = output["prompt_mask"].clone()
        output["prompt_mask"][::2, -1] = 0
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}


def generation_nan(cls: Any) -> dict[str, Method]:
    """One advantage of the second generation batch is NaN."""

    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        self.generations = getattr(self, "generations", 0) + 1
        if self.generations == 2:
            output["advantages"][0] = float("nan")
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}


def generation_advantages(cls: Any) -> dict[str, Method]:
    def _generate_and_score_completions(self, inputs):
        output = cls._generate_and_score_completions(self, inputs)
        output["advantages"] = output["advantages"].abs().clamp(max=1.0)
        return output

    return {"_generate_and_score_completions": _generate_and_score_completions}
