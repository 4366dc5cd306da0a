"""Replaced parts of a model's layers: norms, activations, rotary embeddings, projections, what these call."""

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.harness.case import Customisation
from trl_fused_grpo.parity.case import Trainer

from .callbacks import at


Replace = Callable[[Any], AbstractContextManager[Any]]


def replaced(replace: Replace) -> Customisation:
    """A part is replaced before the training. `replace` gets the model."""
    return Customisation(change_trainer=lambda trainer: replace(trainer.model))


def replaced_later(replace: Replace, attention: str | None = None) -> Customisation:
    """A part is replaced after the first optimizer step, in a model with an `attn_implementation`."""

    def change_trainer(trainer: Trainer) -> AbstractContextManager[Any]:
        stack = ExitStack()

        def act(trainer: Trainer, control: Any, number: int) -> None:
            if number == 0:
                stack.enter_context(replace(trainer.model))

        add_callback: Any = at("on_step_end", act).change_trainer
        add_callback(trainer)
        return stack

    def load_model(checkpoint: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=attention)

    return Customisation(change_trainer=change_trainer, load_model=load_model if attention else None)


def _changed(tensor: Tensor) -> Tensor:
    """Another tensor, by elements alone."""
    return tensor + 0.1 * torch.tanh(tensor)


def grown(queries: Tensor) -> Tensor:
    """Queries `[B, heads, L, D]` that grow with the column."""
    return queries * (1 + 0.05 * torch.arange(queries.shape[2], device=queries.device)).unsqueeze(-1)


def _then_changed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: _changed(function(*args, **kwargs))


def forward_of(place: Callable[[Any], nn.Module]) -> Replace:
    """`module.forward = f` of one module."""

    def replace(model: Any) -> AbstractContextManager[Any]:
        module = place(model)
        return mock.patch.object(module, "forward", _then_changed(module.forward))

    return replace


def class_forward_of(place: Callable[[Any], nn.Module]) -> Replace:
    """The forward of the class of a module."""

    def replace(model: Any) -> AbstractContextManager[Any]:
        cls = type(place(model))
        return mock.patch.object(cls, "forward", _then_changed(cls.forward))

    return replace


def subclass_of(place: Callable[[Any], nn.Module], forward: Callable[..., Any]) -> Replace:
    """A module becomes one of a subclass, whose forward is `forward(original, *args)`."""

    @contextmanager
    def replace(model: Any) -> Generator[None, None, None]:
        module = place(model)
        cls: Any = type(module)

        def own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(partial(cls.forward, self), *args, **kwargs)

        module.__class__ = type(f"Own{cls.__name__}", (cls,), {"forward": own_forward})
        try:
            yield
        finally:
            module.__class__ = cls

    return replace


def mixed(original: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """What a token gets depends on those before it in its row."""
    return original(hidden) + 0.1 * hidden.cumsum(1)


def by_columns(original: Callable[..., Any], hidden: Tensor, position_ids: Tensor) -> Any:
    """Positions are columns."""
    return original(hidden, torch.arange(hidden.shape[1], device=hidden.device).expand_as(position_ids))


def hook_on(place: Callable[[Any], nn.Module]) -> Replace:
    """A forward hook that changes what a module returns."""
    return lambda model: place(model).register_forward_hook(lambda module, args, output: _changed(output))


def attribute_of(place: Callable[[Any], nn.Module], name: str, make: Callable[[Any], Any]) -> Replace:
    """An attribute of a module becomes what `make` makes of it."""

    def replace(model: Any) -> AbstractContextManager[Any]:
        module = place(model)
        return mock.patch.object(module, name, make(getattr(module, name)))

    return replace


def function_in_file(name: str, file: str | None = None, change: Callable[[Tensor], Tensor] = _changed) -> Replace:
    """A function of a file that returns one tensor, or several of which the first counts; by default the model's."""

    def replace(model: Any) -> AbstractContextManager[Any]:
        module = sys.modules[file or type(model).__module__]
        function = getattr(module, name)

        def other(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

        return mock.patch.object(module, name, other)

    return replace


def mask_in_file(model: Any) -> AbstractContextManager[Any]:
    """The function of the model's file that makes its mask, by one of which each token sees the last three alone."""
    file = sys.modules[type(model).__module__]

    def other(*args: Any, **kwargs: Any) -> Tensor:
        hidden, padding = kwargs.get("inputs_embeds", kwargs.get("input_embeds")), kwargs.get("attention_mask")
        place = torch.arange(hidden.shape[1], device=hidden.device)
        distance = place[:, None] - place
        mask = ((distance >= 0) & (distance < 3))[None, None].repeat(hidden.shape[0], 1, 1, 1)
        if padding is not None and padding.dim() == 2:
            mask &= padding[:, None, None].bool() | (distance == 0)
        return mask

    return mock.patch.object(file, "create_causal_mask", other)


def function_of_torch(name: str) -> Replace:
    """A function in `torch.nn.functional`."""
    functions = torch.nn.functional
    return lambda model: mock.patch.object(functions, name, _then_changed(getattr(functions, name)))


def rotate_half(model: Any) -> AbstractContextManager[Any]:
    """What the rotary embedding in the model's file calls."""
    return mock.patch.object(sys.modules[type(model).__module__], "rotate_half", lambda x: x.flip(-1))


class OwnNorm(nn.Module):
    """A norm of the user's, with the weight of another."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-5

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=self.eps)


class OwnMLP(nn.Module):
    """An MLP of the user's, with the projections of another."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(torch.sigmoid(self.gate_proj(hidden)) * self.up_proj(hidden))


def layer(model: Any) -> Any:
    return model.model.layers[0]


def norm(model: Any) -> Any:
    return layer(model).input_layernorm


def mlp(model: Any) -> Any:
    return layer(model).mlp


def activation(model: Any) -> Any:
    return mlp(model).act_fn


def queries(model: Any) -> Any:
    return layer(model).self_attn.q_proj
