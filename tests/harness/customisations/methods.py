"""Replaces methods of the trainer: in a subclass, on TRL's class, or on the instance."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.harness.case import Customisation
from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.trainers import StockGRPOTrainer


Method = Callable[..., Any]

_LOG_PROBS = "_get_per_token_logps_and_entropies"
_REPLACED = ("compute_loss", "_compute_loss", "training_step", _LOG_PROBS)
_UNPATCHED = SimpleNamespace(**{name: getattr(StockGRPOTrainer, name) for name in _REPLACED})


def subclass(*methods: Callable[[Any], dict[str, Any]]) -> Customisation:
    """A subclass. Each of `methods` gets its base class and returns the methods to override, by name."""

    def make_class(cls: type) -> type:
        own: dict[str, Any] = {}
        for make in methods:
            own |= make(cls)
        return type("Customised", (cls,), {"__module__": __name__, **own})

    return Customisation(make_class=make_class)


def on_trl(make: Callable[[Any], dict[str, Any]], late: bool = False) -> Customisation:
    """`GRPOTrainer.name = f`, before the trainer is built or, if `late`, after it; undone after the training."""

    def patch() -> AbstractContextManager[Any]:
        return mock.patch.multiple(StockGRPOTrainer, **make(_UNPATCHED))

    return Customisation(change_trainer=lambda _: patch()) if late else Customisation(patch_trl=patch)


def on_instance(make: Callable[[Any], dict[str, Any]], how: str) -> Customisation:
    """Functions set on the trainer itself, as `"method"` (bound), `"lambda"` or `"partial"` (`functools.partial`)."""

    def change_trainer(trainer: Trainer) -> None:
        for name, function in make(type(trainer)).items():
            bound = {
                "method": lambda f: MethodType(f, trainer),
                "lambda": lambda f: lambda *args, **kwargs: f(trainer, *args, **kwargs),
                "partial": lambda f: partial(f, trainer),
            }[how](function)
            setattr(trainer, name, bound)

    return Customisation(change_trainer=change_trainer)


def squares(trainer: Trainer) -> torch.Tensor:
    """Half the square of every trained weight."""
    return 0.5 * sum(p.square().sum() for p in trainer.model.parameters() if p.requires_grad)


def _call_number(trainer: Trainer) -> int:
    """How often this was called for a trainer, from 1 on."""
    trainer.calls = getattr(trainer, "calls", 0) + 1
    return trainer.calls


def compute_loss_l2(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        return cls.compute_loss(self, *args, **kwargs) + 0.003 * squares(self)

    return {"compute_loss": compute_loss}


def compute_loss_sft(cls: Any) -> dict[str, Method]:
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = cls.compute_loss(self, model, inputs, *args, **kwargs)
        ids = inputs["completion_ids"]
        logits = model(input_ids=ids, attention_mask=inputs["completion_mask"]).logits
        return loss + 0.05 * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return {"compute_loss": compute_loss}


def compute_loss_scaled(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        return cls.compute_loss(self, *args, **kwargs) * (1 + 0.5 * (_call_number(self) % 3))

    return {"compute_loss": compute_loss}


def compute_loss_call_number(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        return cls.compute_loss(self, *args, **kwargs) + 0.001 * _call_number(self) * squares(self)

    return {"compute_loss": compute_loss}


def compute_loss_epsilon(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        self.epsilon_low = self.epsilon_high = (0.001, 0.5)[_call_number(self) % 2]
        return cls.compute_loss(self, *args, **kwargs)

    return {"compute_loss": compute_loss}


def compute_loss_weights(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= 1 + 0.002 * (_call_number(self) % 2)
        return cls.compute_loss(self, *args, **kwargs)

    return {"compute_loss": compute_loss}


def compute_loss_advantages(cls: Any) -> dict[str, Method]:
    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = {**inputs, "advantages": inputs["advantages"] * (1 + _call_number(self) % 2)}
        return cls.compute_loss(self, model, inputs, *args, **kwargs)

    return {"compute_loss": compute_loss}


def compute_loss_seen(cls: Any) -> dict[str, Method]:
    def compute_loss(self, *args, **kwargs):
        loss = cls.compute_loss(self, *args, **kwargs)
        self.seen.append(float(loss))
        return loss

    return {"compute_loss": compute_loss}


def training_step(cls: Any) -> dict[str, Method]:
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(1.5 * loss)
        self._step += 1
        return loss.detach()

    return {"training_step": training_step}


def training_step_gradients(cls: Any) -> dict[str, Method]:
    def training_step(self, *args, **kwargs):
        output = cls.training_step(self, *args, **kwargs)
        self.seen.append(gradient_norm(self.model))
        return output

    return {"training_step": training_step}


def training_step_clips(cls: Any) -> dict[str, Method]:
    def training_step(self, *args, **kwargs):
        output = cls.training_step(self, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)  # after each micro-batch
        return output

    return {"training_step": training_step}


def training_step_weights(cls: Any) -> dict[str, Method]:
    def training_step(self, *args, **kwargs):
        with torch.no_grad():
            self.model.get_output_embeddings().weight *= 1.001
        return cls.training_step(self, *args, **kwargs)

    return {"training_step": training_step}


def gradient_norm(model: torch.nn.Module) -> float | str:
    """Norm of all gradients, or that there is none."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(sum(g.double().square().sum() for g in gradients)) ** 0.5 if gradients else "no gradient"


def _base_log_probs(cls: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return getattr(cls, _LOG_PROBS)(trainer, *args, **kwargs)


def log_probs_other_ids(cls: Any) -> dict[str, Method]:
    def log_probs(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        input_ids = torch.where(input_ids % 3 == 0, input_ids // 2 + 3, input_ids)
        return _base_log_probs(cls, self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    return {_LOG_PROBS: log_probs}


def log_probs_second_call(cls: Any) -> dict[str, Method]:
    def log_probs(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        rest = (attention_mask, logits_to_keep, *args)
        logps, *others = _base_log_probs(cls, self, model, input_ids, *rest, **kwargs)
        other_ids = torch.cat([input_ids[:, :-logits_to_keep], (input_ids[:, -logits_to_keep:] + 5) % 1000], dim=1)
        again, *_ = _base_log_probs(cls, self, model, other_ids, *rest, **kwargs)
        return logps + 0.3 * again, *others

    return {_LOG_PROBS: log_probs}


def log_probs_temperature(cls: Any) -> dict[str, Method]:
    def log_probs(self, *args, **kwargs):
        before, self.temperature = self.temperature, 0.7
        try:
            return _base_log_probs(cls, self, *args, **kwargs)
        finally:
            self.temperature = before

    return {_LOG_PROBS: log_probs}


def log_probs_scaled(cls: Any) -> dict[str, Method]:
    def log_probs(self, *args, **kwargs):
        logps, *others = _base_log_probs(cls, self, *args, **kwargs)
        self.seen.append(float(logps.detach()[0, 0]))
        return logps * 0.9, *others

    return {_LOG_PROBS: log_probs}
