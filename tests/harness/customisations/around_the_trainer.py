"""What a user does around the trainer: base classes, own loops, hooks, modules in the model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback

from tests.harness.case import Customisation
from trl_fused_grpo.parity.case import Trainer
from trl_fused_grpo.parity.trainers import StockGRPOTrainer

from . import callbacks
from .methods import Method


def behind(make: Callable[[Any], dict[str, Method]]) -> Customisation:
    """
    `class Mine(FusedGRPOTrainer, Own)`, where `Own` is a subclass of TRL's trainer with methods and an argument of its
    own. In the order of bases it stands between the fused trainer and TRL's.
    """

    def make_class(cls: type) -> Any:
        def init(self, *args, own_option=None, **kwargs):
            StockGRPOTrainer.__init__(self, *args, **kwargs)

        own = type("Own", (StockGRPOTrainer,), {"__module__": __name__, "__init__": init, **make(StockGRPOTrainer)})
        mine = own if cls is StockGRPOTrainer else type("Mine", (cls, own), {"__module__": __name__})
        return lambda **kwargs: mine(own_option=1, **kwargs)

    return Customisation(make_class=make_class)


def loss_context(cls: Any) -> dict[str, Method]:
    def compute_loss_context_manager(self):
        self.calls = getattr(self, "calls", 0) + 1
        with torch.no_grad():
            self.model.lm_head.weight.mul_(1 + 0.002 * (self.calls % 3))
        return cls.compute_loss_context_manager(self)

    return {"compute_loss_context_manager": compute_loss_context_manager}


def see_backward(trainer: Trainer) -> None:
    backward = trainer.accelerator.backward

    def own(loss: torch.Tensor, **options: Any) -> None:
        trainer.seen.append(float(loss.detach()))
        backward(loss, **options)

    trainer.accelerator.backward = own


def clipped_backward() -> Customisation:
    """`Accelerator.backward = f`, which clips gradients after each backward."""
    backward = Accelerator.backward

    def own(self, loss, **options):
        backward(self, loss, **options)
        torch.nn.utils.clip_grad_norm_(self.clipped.parameters(), 0.3)

    def change_trainer(trainer: Trainer) -> None:
        trainer.accelerator.clipped = trainer.model

    return Customisation(
        patch_trl=lambda: mock.patch.object(Accelerator, "backward", own), change_trainer=change_trainer
    )


def step_in_backward(trainer: Trainer) -> None:
    """Every weight moves as soon as its gradient is computed."""

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(0.3 * parameter.grad)
        parameter.grad = None

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def see_all_gradients(trainer: Trainer) -> None:
    def see(gradients: Any) -> None:
        trainer.seen.append(sum(float(gradient.norm()) for gradient in gradients))

    torch.autograd.graph.register_multi_grad_hook(list(trainer.model.parameters()), see)


class _Forwarding:
    """Forwards every event to another callback."""

    def __init__(self, callback: TrainerCallback):
        self.__dict__["callback"] = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["callback"], name)


class _Clipping(TrainerCallback):
    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_substep_end(self, args, state, control, **kwargs):
        callbacks.clip_gradients(self.trainer, control, 0)


def forwarding_callback(trainer: Trainer) -> None:
    trainer.callback_handler.callbacks.append(_Forwarding(_Clipping(trainer)))


def callback_class(trainer: Trainer) -> AbstractContextManager[Any]:
    return mock.patch.object(TrainerCallback, "on_substep_end", _Clipping(trainer).on_substep_end)


def later(act: Callable[[Trainer], Any]) -> Customisation:
    """`act` runs before the second accumulation window of a generation batch."""
    return callbacks.at("on_step_begin", lambda trainer, _, number: act(trainer) if number == 1 else None)


def clip_by_hooks(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=0.3))


def add_clipping(trainer: Trainer) -> None:
    trainer.add_callback(_Clipping(trainer))


def scale_reference(trainer: Trainer) -> None:
    """A hook on the reference model."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        name = "log_probs" if getattr(output, "log_probs", None) is not None else "logits"
        output[name] = 0.9 * output[name]
        return output

    trainer.ref_model.register_forward_hook(hook)


def own_loop(trainer: Trainer) -> None:
    """`compute_loss`, backward and a step for each micro-batch."""
    trainer.current_gradient_accumulation_steps = 4
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.model.train()
    for _, batch in zip(range(4), trainer.get_train_dataloader(), strict=False):
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        trainer.seen.append(float(loss.detach()))
        trainer.accelerator.backward(loss)
        trainer._step += 1
        optimizer.step()
        optimizer.zero_grad()


def own_steps(trainer: Trainer) -> None:
    """`training_step` and a step for each micro-batch."""
    trainer.current_gradient_accumulation_steps = 4
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    for _, batch in zip(range(4), trainer.get_train_dataloader(), strict=False):
        trainer.seen.append(float(trainer.training_step(trainer.model, batch, None)))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def generate_alone(trainer: Trainer) -> None:
    """Records what generation returns, without a loss."""
    trainer.model.train()
    output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    for name in sorted(output):
        value = output[name]
        trainer.seen.append(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            mask = output["completion_mask"] if value.shape == output["completion_mask"].shape else 1
            trainer.seen.append(float((value.double() * mask).sum()))


class _Gated(nn.Module):
    """A module plus a gate, which starts at zero, times the mean over a row."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.gate * hidden.mean(1, keepdim=True)


class _ScaledInTraining(nn.Module):
    """A module whose output is scaled in forwards with gradient, or in its training mode."""

    def __init__(self, inner: nn.Module, by_mode: bool = False):
        super().__init__()
        self.inner, self.by_mode = inner, by_mode

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        is_scaled = self.training if self.by_mode else torch.is_grad_enabled()
        return self.inner(hidden) * (1.05 if is_scaled else 1.0)


def around_mlp(make: Callable[[Any, Any], nn.Module]) -> Customisation:
    """The first layer's MLP is replaced by `make(config, mlp)`."""
    from transformers import AutoModelForCausalLM

    def load_model(checkpoint: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        layer = model.model.layers[0]
        layer.mlp = make(model.config, layer.mlp)
        return model

    return Customisation(load_model=load_model)


def gate(config: Any, mlp: nn.Module) -> nn.Module:
    return _Gated(mlp)


def scaled_in_training(config: Any, mlp: nn.Module) -> nn.Module:
    return _ScaledInTraining(mlp)


def scaled_in_training_mode(config: Any, mlp: nn.Module) -> nn.Module:
    return _ScaledInTraining(mlp, by_mode=True)


def torch_encoder(config: Any, mlp: nn.Module) -> nn.Module:
    """The MLP, then a layer of torch that mixes all tokens of its input."""
    torch.manual_seed(0)
    return nn.Sequential(mlp, nn.TransformerEncoderLayer(config.hidden_size, 2, 32, dropout=0.0, batch_first=True))


def on_instance_later(make: Callable[[Any], dict[str, Method]]) -> Customisation:
    def replace(trainer: Trainer) -> None:
        for name, function in make(type(trainer)).items():
            setattr(trainer, name, MethodType(function, trainer))

    return later(replace)


def interrupted_loss(trainer: Trainer) -> None:
    """A KeyboardInterrupt between forward and backward, where TRL reduces a metric."""
    reduce, calls = trainer.accelerator.reduce, iter(range(10_000))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return reduce(*args, **options)

    trainer.accelerator.reduce = interrupted


def train_twice(trainer: Trainer) -> None:
    trainer.train()
    trainer.args.max_steps, trainer.args.gradient_accumulation_steps = 6, 2
    trainer.train()
