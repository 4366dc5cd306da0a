"""
What was found of code that is not the libraries' own, and the one level of the ladder that follows from it:

- `window`: trainer and model are the libraries' own code, nothing hooked or replaced. Everything is done.
- `rows`: something may see a micro-batch, a generation batch, a gradient or the moment when weights move. Packed rows,
  fused head, compiled layers; each micro-batch in its own forward and backward; old and reference log-probs where TRL
  computes them.
- `head`: any of the model's code is not a library's, or it changes buffers in its forward, or mixes rows. TRL's padded
  rows in TRL's order, only the head fused.
- `stock`: the log-prob method, the head, or what stands between hidden states and head was replaced. TRL's own code.

What unknown code does is not tried out. The lowest level of all findings counts.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import (
    is_library_class,
    is_library_function,
    is_library_hook,
    is_library_module,
    replaced_in,
    replaced_name,
)
from trl_fused_grpo._compat.restated import unknown_source
from trl_fused_grpo._compat.tried_architectures import is_tried
from trl_fused_grpo._utils import modules_as_they_are, of_all_processes
from trl_fused_grpo.modeling.head.output_projection import layer_before_head


logger = logging.get_logger(__name__)


class Level(IntEnum):
    """How much of a step may be done otherwise than stock does it. The module's table says when and what."""

    STOCK = 0
    HEAD = 1
    ROWS = 2
    WINDOW = 3


class Reason(NamedTuple):
    """One finding, in words, the most that may be done with it, and whether it is one of unknown model code."""

    level: Level
    text: str
    is_of_model: bool = False


WHAT_IS_DONE = {
    Level.WINDOW: "everything is fused: packed rows, fused head, compiled layers, forwards that micro-batches share",
    Level.ROWS: "packed rows, fused head and compiled layers; each micro-batch has a forward and a backward of its own",
    Level.HEAD: "rows keep TRL's padding and order, only the head is fused",
    Level.STOCK: "TRL's own log-prob method runs",
}


@dataclass(frozen=True)
class Findings:
    """All reasons to do less."""

    reasons: tuple[Reason, ...] = ()  # in the order in which they were found

    @property
    def level(self) -> Level:
        """The lowest level of all reasons."""
        return min((reason.level for reason in self.reasons), default=Level.WINDOW)

    @property
    def knows_model(self) -> bool:
        """Return `True` if all code of the model is a library's, so that its layers may run otherwise, or twice."""
        return not any(reason.is_of_model for reason in self.reasons)

    def why_below(self, level: Level) -> str | None:
        """The text of the lowest reason that is below a level, or `None` where that level may be taken."""
        below = [reason for reason in self.reasons if reason.level < level]
        return min(below, key=lambda reason: reason.level).text if below else None


class Ladder:
    """Keeps the findings of a training, and tells a new one once."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.findings = Findings()
        self._for_good: list[Reason] = []
        self.elsewhere: list[Reason] = []  # what another process had found when all looked
        self.has_one_loss = True  # all processes had replaced the same methods of the loss, or none, when all looked
        self._told: set[str] = set()
        self.walks: dict[Any, Any] | None = None  # over modules, while TRL trains: they would keep a model

    @property
    def level(self) -> Level:
        """The level that counts now."""
        return self.findings.level

    def as_found(self) -> AbstractContextManager[None]:
        """While it lasts, modules are known to be those of the last look, if nobody's code has run since."""
        return modules_as_they_are(self.walks) if self.level == Level.WINDOW else nullcontext()

    def fall(self, reason: Reason) -> None:
        """From now on, for the whole training, at most the level of a reason counts."""
        self._for_good.append(reason)
        self.findings = Findings((*self.findings.reasons, reason))
        self._tell()

    def look(self, engine: Any, *more: Reason, is_in_train: bool = False, together: bool = False) -> Findings:
        """Gather the findings anew."""
        trainer = self.trainer
        self.walks = {} if is_in_train else None
        with modules_as_they_are(self.walks):
            reasons = [*reasons_of_trainer(trainer, is_in_train), *more, *self._for_good]
            for model in {id(m): m for m in (trainer.model_wrapped, trainer.ref_model) if m is not None}.values():
                reasons += reasons_of_model(model, engine.causal_lm(model), engine.options.forces_rows)
        findings = Findings(tuple(dict.fromkeys(reasons)))
        if together:
            replaced = [replaced_method(trainer, [name]) for name in LOSS_METHODS]
            mine = [int(findings.level), crc32(str(replaced).encode())]
            levels, methods = of_all_processes(trainer.accelerator, "levels", mine).unbind(1)
            self.has_one_loss = len({*methods.tolist()}) == 1
            lowest = Level(int(levels.amin()))
            is_elsewhere = lowest < findings.level
            self.elsewhere = [Reason(lowest, "another process found code of yours")] if is_elsewhere else []
        findings = Findings((*findings.reasons, *self.elsewhere))
        self.findings = findings
        self._tell()
        return findings

    def of_call(self, engine: Any, model: nn.Module) -> Findings:
        """The findings for a call of the log-prob method with a model, which may be neither policy nor reference."""
        if model in (self.trainer.model, self.trainer.model_wrapped, self.trainer.ref_model):
            return self.findings
        reasons = reasons_of_model(model, engine.causal_lm(model), engine.options.forces_rows)
        return Findings((*self.findings.reasons, *reasons))

    def _tell(self) -> None:
        for level, text, _ in self.findings.reasons:
            if text not in self._told:
                self._told.add(text)
                logger.warning(f"Level {level.name.lower()} ({WHAT_IS_DONE[level]}), because {text}.")


# Whose methods a trainer runs


_PACKAGE = __name__.partition(".")[0]


def _is_fused_trainer(cls: type) -> bool:
    return cls.__module__ in (f"{_PACKAGE}.trainer", f"{_PACKAGE}.rloo")


def _is_trls(trainer: Any, cls: type) -> bool:
    """Return `True` if a class is TRL's own trainer, or one that this inherits from."""
    return cls in trainers.trl_class(type(trainer)).__mro__


def replaced_method(trainer: Any, names: Iterable[str]) -> str | None:
    """
    The first of these methods of a trainer that is not TRL's or this package's, as `Class.method`, or `None`. It may
    have been replaced in a subclass, on the instance, or in TRL's own class.
    """
    for name in names:
        if name in vars(trainer):
            return f"the instance's {name}"
        for cls in type(trainer).__mro__:
            method = vars(cls).get(name)
            if method is None:
                continue
            is_known = _is_fused_trainer(cls) or _is_trls(trainer, cls)
            if not is_known or not is_library_function(getattr(method, "__func__", method)):
                return f"{cls.__name__}.{name}"
    return None


def replaced_behind(trainer: Any, name: str) -> str | None:
    """
    What `super()` finds for a method of the fused trainer, as `Class.method`, if that is not TRL's; `None` if it is.
    Either TRL's own class was patched, or a class of the user's comes between the two in the method resolution order.
    """
    classes = type(trainer).__mro__
    fused = max((place for place, cls in enumerate(classes) if _is_fused_trainer(cls)), default=-1)
    cls = next(cls for cls in classes[fused + 1 :] if name in vars(cls))
    is_known = _is_trls(trainer, cls) and is_library_function(vars(cls)[name])
    return None if is_known else f"{cls.__name__}.{name}"


OBJECTIVE_METHODS = ("_compute_loss", *trl_compat.OBJECTIVE_METHODS)
LOSS_METHODS = ("compute_loss", "compute_liger_loss", "_get_per_token_logps_and_entropies", *OBJECTIVE_METHODS)


def replaced_objective(trainer: Any) -> str | None:
    """
    The first method of TRL's objective that the user replaced, as `Class.method`; `None` where all are TRL's. Only
    TRL's own are known to read nothing else of a micro-batch than `GRPOObjective` does.
    """
    return replaced_method(trainer, OBJECTIVE_METHODS)


def computed_option(trainer: Any) -> str | None:
    """
    An attribute that a class of the user's computes at each access, as `Class.option`, or `None`: one that log-probs
    are computed with, or any by `__getattribute__`.
    """
    for cls in type(trainer).__mro__:
        if not _is_trls(trainer, cls):
            for name in ("__getattribute__", "temperature", "args"):
                if hasattr(type(vars(cls).get(name)), "__get__"):
                    return f"{cls.__name__}.{name}"
    return None


# The trainer


def reasons_of_trainer(trainer: Any, is_in_train: bool) -> Iterator[Reason]:
    """Yield a reason for all code of the user's that runs in or around a training step."""
    behind = replaced_behind(trainer, "_get_per_token_logps_and_entropies")
    if behind is not None:
        yield Reason(Level.STOCK, f"{behind} was replaced")
    method = (
        replaced_method(trainer, (*trainers.STEP_METHODS, *trl_compat.OBJECTIVE_METHODS))
        or replaced_behind(trainer, "train")
        or (None if is_in_train else replaced_method(trainer, ["train"]))
        or computed_option(trainer)
    )
    if method is not None:
        # Where TRL computes log-probs of padding, such a method may read them
        level = Level.HEAD if trl_compat.COMPUTES_LOGPS_OF_PADDING else Level.ROWS
        yield Reason(level, f"{method} may see micro-batches")
    elif (source := unknown_source(trainer)) is not None:
        yield Reason(Level.ROWS, source)
    for owner, names in _watchers(trainer):
        name = _replaced_attribute(owner, names)
        if name is not None:
            yield Reason(Level.ROWS, f"{name} may see micro-batches, gradients or the moment when weights move")
    for parameter in torch_compat.parameters_of(trainer.model):
        hooks = torch_compat.gradient_hooks(parameter)
        if torch_compat.has_optimizer_in_backward(parameter) or not all(map(is_library_hook, hooks)):
            name = next(name for name, other in trainer.model.named_parameters() if other is parameter)
            yield Reason(Level.ROWS, f"a hook on the gradient of {name} may see that of each micro-batch")
            break


def _watchers(trainer: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Objects that run between micro-batches, and their methods that do."""
    handler = trainer.callback_handler
    yield from ((one, ("call_event", "on_substep_end")) for one in (handler, *handler.callbacks))
    yield trainer.accelerator, ("backward", "accumulate", "__class__")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer is not None:
        yield optimizer, ("step", "zero_grad", "__class__")


def _replaced_attribute(owner: Any, names: Iterable[str]) -> str | None:
    """The first of these methods of an object that is not a library's, as `Class.method`; `__class__` is the class."""
    for name in names:
        value: Any = getattr(owner, name, None)
        is_known = is_library_class(value) if name == "__class__" else value is None or is_library_function(value)
        if not is_known:
            return type(owner).__name__ if name == "__class__" else f"{type(owner).__name__}.{name}"
    return None


# A model


def reasons_of_model(model: nn.Module, causal_lm: PreTrainedModel, forces_rows: bool) -> list[Reason]:
    """What of a model is not a library's, or makes a sequence depend on others."""
    outer = replaced_around_head(model, causal_lm)
    stock = (
        [Reason(Level.STOCK, f"{outer} may see or change what the model returns in TRL's own call")] if outer else []
    )
    modules = torch_compat.modules_of(model)
    inner = modules[modules.index(causal_lm) :]  # all behind its wrappers
    found = (
        _unknown_code({*map(type, inner)}),
        _replaced_in_module(modules, inner),
        _replaced_function(inner),
        _changing_or_mixing(causal_lm, inner),
        None if is_tried(causal_lm) else f"{type(causal_lm).__name__} was not tried without TRL's padding",
    )
    level = Level.ROWS if forces_rows else Level.HEAD
    word = f", which fused_layout={'packed'!r} says may be packed" if forces_rows else ""
    texts = (f"{what.removesuffix(',')}{word}" for what in found if what is not None)
    reasons = [*stock, *(Reason(level, text, is_of_model=True) for text in texts)]
    if any(map(torch_compat.is_compiled, modules)):  # the user's compiler would trace into packed attention
        reasons.append(Reason(Level.HEAD, "the model, or a part of it, is compiled already", is_of_model=True))
    return reasons


def replaced_around_head(model: nn.Module, causal_lm: PreTrainedModel) -> str | None:
    """
    What was hooked or replaced on a causal language model, on a wrapper around it, on its output projection or between
    the two, in words, or `None`. Such code would see other outputs here than in TRL's own call.
    """
    if (mode := torch_compat.foreign_mode()) is not None:
        return mode
    path = next(name for name, module in model.named_modules() if module is causal_lm)
    wrappers = [model]
    for name in path.split(".") if path else ():
        wrappers.append(getattr(wrappers[-1], name))
    head: Any = causal_lm.get_output_embeddings()
    parts = [] if head is None else list(head.modules())
    for wrapper in wrappers[:-1]:
        forward = vars(wrapper).get("forward")
        bound_to = getattr(forward, "__self__", None)
        # PEFT's adaption prompt calls the forward that the model had when the adapter was made
        if isinstance(bound_to, nn.Module) and bound_to is not wrapper and forward != bound_to.forward:
            return f"{type(wrapper).__name__}, which holds an earlier forward of {type(bound_to).__name__},"
    if trl_compat.LOGPS_FROM_LOGITS:
        wrappers_of_head, layer = wrappers, layer_before_head(causal_lm)
        if architecture.has_other_logits(causal_lm):
            return f"{type(causal_lm).__name__}, whose logits come from more than its output projection,"
        if layer is not None:
            return f"{layer}, which stands between the model's hidden states and its output projection,"
        if (replaced := torch_compat.replaced_in_linear() or trl_compat.replaced_in_logps()) is not None:
            return replaced
    else:
        wrappers_of_head = wrappers[:-1]  # TRL calls the model's own backbone and head, whatever its forward does
    unknown = _unknown_code({*map(type, (*wrappers_of_head, *parts))})
    return unknown or _replaced_in_module([*wrappers, *parts], [causal_lm, *parts])


def _unknown_code(classes: Iterable[type]) -> str | None:
    """A class that is not a library's, or a method that was replaced in one, in words, or `None`."""
    bases: set[type] = set()
    for cls in sorted(classes, key=lambda cls: cls.__name__):
        if not is_library_class(cls):
            return f"{cls.__name__}, whose code is not known,"
        bases.update(cls.__mro__)
    for cls in bases - {object}:
        name = replaced_in(cls, but=model_compat.GENERATION_METHODS)
        if name is not None:
            return f"{cls.__name__}.{name}, which was replaced,"
    return None


def _hooked_or_replaced(modules: Iterable[nn.Module]) -> str | None:
    """A hook, a forward or a `train()` of its own that a module has and that is not a library's, or `None`."""
    forward, forward_pre, backward, backward_pre = torch_compat.HOOKS
    for module in modules:  # thousands, most of them without
        own = module.__dict__
        if own[forward] or own[forward_pre] or own[backward] or own[backward_pre]:
            hooks = [hook for name in torch_compat.HOOKS for hook in own[name].values()]
            if not all(map(is_library_hook, hooks)):
                return f"a hook on {type(module).__name__}"
        for name in ("forward", "train"):
            if name in own and not is_library_function(own[name], getattr(type(module), name)):
                return f"the {name} of {type(module).__name__}"
    return None


# What every module has: parts, weights, hooks. Forwards are looked at with the hooks
_NOT_LOOKED_AT = frozenset(
    {"forward", "config", "generation_config", *vars(nn.Module()), *model_compat.GENERATION_METHODS}
)


def _replaced_in_module(modules: list[nn.Module], inner: list[nn.Module]) -> str | None:
    """A hook, a function or a weight that modules hold and that is not a library's, in words, or `None`."""
    if not all(is_library_hook(hook) for hooks in torch_compat.GLOBAL_HOOKS for hook in hooks.values()):
        return "a hook on every module"
    if (changed := _hooked_or_replaced(modules)) is not None:
        return changed
    for module in inner:  # thousands, with dozens of attributes each
        own = module.__dict__
        if not _PLAIN.issuperset(map(type, own.values())):
            for name in own.keys() - _NOT_LOOKED_AT:
                cls = type(own[name])
                if cls not in _PLAIN and (not _is_known_class(cls) or replaced_name(own, [name])):
                    return f"{name} of {type(module).__name__}, which was replaced,"
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if type(tensor) not in _PLAIN and not _is_known_class(type(tensor)):
                return f"{type(tensor).__name__}, whose code is not known,"
    return None


_CONTAINERS = (tuple, list, set, dict, OrderedDict)
_PLAIN = frozenset({bool, int, float, str, type(None), *_CONTAINERS, torch.dtype, torch.Tensor, nn.Parameter})
_is_known_class = lru_cache(maxsize=1024)(is_library_class)


def _replaced_function(modules: Iterable[nn.Module]) -> str | None:
    """A function of torch or transformers that modules may call and that is not a library's, in words, or `None`."""
    if not torch_compat.sdpa_is_own():
        return "scaled_dot_product_attention, which was replaced,"
    files = filter(is_library_module, {cls.__module__ for kind in {*map(type, modules)} for cls in kind.__mro__})
    for name in (*model_compat.FILES, *sorted(files)):
        file = sys.modules.get(name)
        replaced = None if file is None else replaced_in(file)
        if replaced is not None:
            return f"{replaced} of {name}, which was replaced,"
    replaced = replaced_in(torch.Tensor)
    if replaced is not None:
        return f"torch.Tensor.{replaced}, which was replaced,"
    configs = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    return next(filter(None, map(model_compat.foreign_attention, configs)), None)


# Modules of torch's whose output for a token depends on others, and those that change their buffers in each forward
_MIX_TOKENS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.GroupNorm)
_CHANGE_BUFFERS = (torch_compat.BatchNorm, torch_compat.InstanceNorm, torch_compat.SpectralNorm)


def _changing_or_mixing(causal_lm: PreTrainedModel, modules: Iterable[nn.Module]) -> str | None:
    """A module of torch's that mixes rows, or changes buffers or weights in each forward, in words, or `None`."""
    kinds = {*map(type, modules)}
    if any(issubclass(cls, _MIX_TOKENS) for cls in kinds):  # a vision tower's may
        for module in architecture.text_model(causal_lm).modules():
            if isinstance(module, _MIX_TOKENS):
                return f"{type(module).__name__}, which mixes the tokens of its input,"
    for cls in kinds:
        if issubclass(cls, _CHANGE_BUFFERS) or cls.__module__.startswith("torch.ao."):
            return f"{cls.__name__}, which changes its buffers in each forward,"
    embeddings = {cls for cls in kinds if issubclass(cls, (nn.Embedding, nn.EmbeddingBag))}
    for module in modules:
        own = module.__dict__
        if type(module) in embeddings and (own["scale_grad_by_freq"] or own["max_norm"] is not None):
            return f"{type(module).__name__}, whose weights or gradients depend on the tokens of a forward,"
    return None


def log_no_effect(asked_for: str | None, reason: str | None) -> None:
    """Log once why something has no effect, where there is a reason and it was asked for."""
    if reason is not None and asked_for is not None:
        logger.warning_once(f"{asked_for} has no effect, because {reason}.")
