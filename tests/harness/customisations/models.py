"""Hooks on the model and its parameters, replaced layers, and models whose output depends on the column."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import ModelOutput

from tests.harness.case import Customisation
from trl_fused_grpo.parity.case import Trainer


def _causal_lm(trainer: Trainer) -> Any:
    return trainer.model


def _layer(trainer: Trainer) -> Any:
    return _causal_lm(trainer).model.layers[0]


def forward_hook(place: Callable[[Trainer], nn.Module], act: Callable[[Trainer, Any], Any]) -> Customisation:
    """A forward hook that calls `act` with the trainer and the output, in forwards with gradient."""

    def change_trainer(trainer: Trainer) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return act(trainer, output) if torch.is_grad_enabled() else None

        place(trainer).register_forward_hook(hook)

    return Customisation(change_trainer=change_trainer)


def on_model(act: Callable[[Trainer, Any], Any]) -> Customisation:
    return forward_hook(_causal_lm, act)


def on_head(act: Callable[[Trainer, Any], Any]) -> Customisation:
    return forward_hook(lambda trainer: trainer.model.get_output_embeddings(), act)


def on_layer(act: Callable[[Trainer, Any], Any]) -> Customisation:
    return forward_hook(_layer, act)


def _result(output: Any) -> tuple[str, torch.Tensor]:
    """What TRL reads from the model's output: log-probs from TRL 1.15 on, logits before."""
    name = "log_probs" if getattr(output, "log_probs", None) is not None else "logits"
    return name, getattr(output, name)


def see_output(trainer: Trainer, output: Any) -> None:
    trainer.seen.append(str(isinstance(output, ModelOutput)))
    name, value = _result(output)
    trainer.seen += [name, float(value.detach().double().square().sum())]


def scale_output(trainer: Trainer, output: Any) -> Any:
    name, value = _result(output)
    output[name] = 0.9 * value
    return output


def scale_tensor(trainer: Trainer, output: torch.Tensor) -> torch.Tensor:
    trainer.seen.append(str(tuple(output.shape)))
    return 0.9 * output


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # transformers 4 layers return tuples


def _replaced(output: Any, hidden: torch.Tensor) -> Any:
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def see_hidden(trainer: Trainer, output: Any) -> None:
    trainer.seen.append(str(tuple(_hidden(output).shape)))


def by_column(trainer: Trainer, output: Any) -> Any:
    """A tensor that depends on the column is added."""
    hidden = _hidden(output)
    columns = torch.arange(hidden.shape[1], device=hidden.device)
    return _replaced(output, hidden + 0.2 * torch.sin(columns).unsqueeze(-1))


def by_batch(trainer: Trainer, output: Any) -> Any:
    """The output is scaled by the number of rows."""
    hidden = _hidden(output)
    return _replaced(output, hidden * (1 + 0.1 * hidden.shape[0]))


def by_token(trainer: Trainer, output: Any) -> Any:
    """The output of each token changes in the same way at every position, so that any layout gives the same."""
    hidden = _hidden(output)
    return _replaced(output, hidden + 0.1 * torch.tanh(hidden))


def pre_hook() -> Customisation:
    """A forward pre-hook on the model that sees and changes its token ids."""

    def change_trainer(trainer: Trainer) -> None:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            ids = kwargs["input_ids"]
            trainer.seen.append(str(tuple(ids.shape)))
            return args, {**kwargs, "input_ids": torch.where(ids % 3 == 0, ids // 2 + 3, ids)}

        trainer.model.register_forward_pre_hook(hook, with_kwargs=True)

    return Customisation(change_trainer=change_trainer)


def parameter_hook(act: Callable[[Trainer, torch.Tensor], torch.Tensor | None]) -> Customisation:
    """A hook on every parameter's gradient."""

    def change_trainer(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.register_hook(lambda gradient: act(trainer, gradient))

    return Customisation(change_trainer=change_trainer)


def clip(trainer: Trainer, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def see_norm(trainer: Trainer, gradient: torch.Tensor) -> None:
    trainer.seen.append(float(gradient.double().norm()))


def optimizer_in_backward() -> Customisation:
    """Torch's own way to move a weight as soon as its gradient is accumulated, with hooks that are on no parameter."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    def change_trainer(trainer: Trainer) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, list(trainer.model.parameters()), {"lr": 0.3})

    return Customisation(change_trainer=change_trainer)


def accumulate_hook() -> Customisation:
    """A hook that runs after a gradient was added to `p.grad`, once in each backward."""

    def change_trainer(trainer: Trainer) -> None:
        weight = _layer(trainer).mlp.up_proj.weight
        weight.register_post_accumulate_grad_hook(lambda p: trainer.seen.append(float(p.grad.double().norm())))

    return Customisation(change_trainer=change_trainer)


def backward_hook() -> Customisation:
    """A full backward hook on a layer, which sees and changes the gradient of its input."""

    def change_trainer(trainer: Trainer) -> None:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            trainer.seen.append(float(grad_output[0].double().norm()))
            return tuple(None if g is None else g.clamp(-0.01, 0.01) for g in grad_input)

        _layer(trainer).mlp.register_full_backward_hook(hook)

    return Customisation(change_trainer=change_trainer)


def instance_forward(place: Callable[[Trainer], nn.Module], act: Callable[[Trainer, Any], Any]) -> Customisation:
    """`layer.forward = f` on one layer."""

    def change_trainer(trainer: Trainer) -> None:
        layer = place(trainer)
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: act(trainer, forward(*args, **kwargs))

    return Customisation(change_trainer=change_trainer)


def layer_forward(act: Callable[[Trainer, Any], Any]) -> Customisation:
    return instance_forward(_layer, act)


def mlp_forward(act: Callable[[Trainer, Any], Any]) -> Customisation:
    return instance_forward(lambda trainer: _layer(trainer).mlp, act)


class OwnBackbone(LlamaModel):
    """A user's model whose output depends on the column."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        output = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        columns = torch.arange(output.last_hidden_state.shape[1], device=output.last_hidden_state.device)
        output.last_hidden_state = output.last_hidden_state + 0.2 * torch.cos(columns).unsqueeze(-1)
        return output


def own_backbone() -> Customisation:
    def load_model(checkpoint: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.model.__class__ = OwnBackbone
        return model

    return Customisation(load_model=load_model)


def own_class() -> Customisation:
    """A user's class whose forward scales the logits. Whether TRL reads them depends on its version."""

    def load_model(checkpoint: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = super(own, self).forward(*args, **kwargs)
            output.logits = 0.9 * output.logits
            return output

        own = type("OwnCausalLM", (type(model),), {"forward": forward})
        model.__class__ = own
        return model

    return Customisation(load_model=load_model)


def own_attention() -> Customisation:
    """A user's attention function, whose queries grow with the column."""

    def attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        columns = torch.arange(query.shape[2], device=query.device)
        return sdpa_attention_forward(module, query * (1 + 0.05 * columns).unsqueeze(-1), *args, **kwargs)

    def load_model(checkpoint: Path) -> Any:
        AttentionInterface.register("own", attention)
        return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="own")

    return Customisation(load_model=load_model)


def without_sampled_routing() -> Customisation:
    """Routers that draw a random number for each token in training choose as they do in evaluation."""

    def change_trainer(trainer: Trainer) -> None:
        for module in trainer.model.modules():
            if "moe" in type(module).__name__.lower() and hasattr(module, "experts"):
                module.train = lambda mode=True, module=module: module
                for inner in module.modules():
                    inner.training = False

    return Customisation(change_trainer=change_trainer)
