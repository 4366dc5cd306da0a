"""
Packed rows in models that take transformers' attention interface: our attention and mask functions stand in its tables,
and in the modeling files with an attention of their own, while a forward, or the backward of its graph, needs them.
"""

import functools
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._utils import temporary_value

from .eager import EagerLayer, eager_attention
from .masks import are_sequence_masks, attend_with_masks, build_sequence_masks, mask_device
from .varlen import gathered_keys, traced_attention, varlen_attention
from .watch import PACKED_ARGUMENTS, WatchedCall, running_call, with_carried_arguments


class InTable(NamedTuple):
    """An entry of one of transformers' tables, which all instances of the table share."""

    table: Any
    name: str

    def read(self) -> Any:
        return self.table().get(self.name)

    def write(self, function: Callable) -> None:
        self.table.register(self.name, function)


class InFile(NamedTuple):
    """A function of a modeling file, which the file's layers look up when they are called."""

    file: ModuleType
    name: str

    def read(self) -> Any:
        return getattr(self.file, self.name)

    def write(self, function: Callable) -> None:
        setattr(self.file, self.name, function)


# The watched calls that are alive. One lives as long as something refers to it: the forward that it watches, or a
# checkpointed layer that will be computed again in backward and holds the keyword arguments of its first call
_living: list[weakref.ref[WatchedCall]] = []
_lock = threading.RLock()  # backward lets go of watched calls in autograd's threads
_TABLES: dict[str, Any] = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
# The modeling files of a model's attention layers; to walk over all modules takes as long as a layer
_FILES: weakref.WeakKeyDictionary[nn.Module, list[ModuleType]] = weakref.WeakKeyDictionary()


@contextmanager
def watched_call(call: WatchedCall, model: nn.Module | None = None) -> Generator[WatchedCall, None, None]:
    """
    While it lasts, what models ask of attention is watched. Where rows are packed, models build no attention masks:
    keyword arguments say where the sequences begin ([`cu_seqlens_arguments`]).

    Until the `call` is let go, our functions stand in transformers' tables. Give the call to the model as `watched`
    where rows are packed: layers that are computed again in backward hold it as long as they need them.
    """
    _install_while_alive(call, model)
    with temporary_value(running_call, call):
        yield call


@contextmanager
def text_model_alone(causal_lm: PreTrainedModel) -> Generator[None, None, None]:
    """
    While it lasts, the parts of a composite model beside its text model, such as a vision tower, run as they always do:
    they are not watched, and do not get the [`PACKED_ARGUMENTS`], which describe rows of text.
    """
    tokens = []

    def enter(module, args, kwargs):
        tokens.append(running_call.set(None))
        return args, {name: value for name, value in kwargs.items() if name not in PACKED_ARGUMENTS}

    def leave(*_):
        running_call.reset(tokens.pop())

    with ExitStack() as hooks:
        for part in architecture.modules_beside_text(causal_lm):  # none where the text model is the backbone
            hooks.enter_context(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(leave, always_call=True))
        yield


def why_replaced(causal_lm: nn.Module, implementation: str) -> str | None:
    """Why packed rows cannot stand for a model's attention, or `None`: a function of it is not transformers' own."""
    functions = {f"the {kind} function": table.get(implementation) for kind, table in _TABLES.items()}
    if implementation == "eager":
        name = model_compat.EAGER_ATTENTION
        functions |= {f"{name} of {file.__name__}": getattr(file, name) for file in _modeling_files(causal_lm)}
    for name, function in functions.items():
        if function is not None and not (_is_ours(function) or model_compat.is_transformers_own(function)):
            return f"{name} for {implementation!r} is not transformers' own"
    return None


def _is_ours(function: Any) -> bool:
    return getattr(function, "__globals__", None) is globals()


def uninstall_attention() -> None:
    """
    Take our functions out of transformers' tables, unless the graph of a packed forward still needs them in backward.

    They go by themselves when the last forward and the last such graph do; this finds those that garbage holds.
    Idempotent.
    """
    if _living or _replaced:
        gc.collect()
        _restore_unless_needed()


# Where our functions may stand
_replaced: set[InTable | InFile] = set()


def _install_while_alive(call: WatchedCall, model: nn.Module | None) -> None:
    """
    Let transformers' attention heed where packed sequences begin, and watch which masks models ask for, while `call`
    lives. Other calls of these functions get what they always got. A function that is not transformers' own stays as
    it is.
    """
    with _lock:
        # Before anything is replaced: Ctrl-C may come at any line
        _living.append(weakref.ref(call, _restore_unless_needed))
        for place, replacement in _replacements(model):
            function = place.read()
            if model_compat.is_transformers_own(function):
                _replaced.add(place)
                place.write(replacement(function))


def _restore_unless_needed(*_: Any) -> None:
    """When the last watched call is let go, transformers has its own functions back."""
    with _lock:
        _living[:] = [weak for weak in _living if weak() is not None]
        if _living:
            return
        for place in [*_replaced]:
            function = place.read()
            if _is_ours(function):  # what the user has registered since then stays
                place.write(function.__wrapped__)
            _replaced.discard(place)


def _replacements(model: nn.Module | None) -> Iterator[tuple[InTable | InFile, Callable]]:
    """Where our functions stand, and what makes them of transformers' own."""
    yield InTable(AttentionInterface, "sdpa"), _watched_sdpa
    for name in model_compat.flash_implementations():
        yield InTable(AttentionInterface, name), _watched_flash
    for name in ("sdpa", "eager", "flex_attention"):
        yield InTable(AttentionMaskInterface, name), _watched_mask
    if model is not None:
        for file in _modeling_files(model):
            yield InFile(file, model_compat.EAGER_ATTENTION), _watched_eager


def _modeling_files(model: nn.Module) -> list[ModuleType]:
    """The files of a model's layers that have an attention function of their own."""
    if model not in _FILES:
        # FSDP2 makes classes of its own, and users do, which inherit the forward of another file
        names = {cls.__module__ for kind in {type(module) for module in model.modules()} for cls in kind.__mro__}
        files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        _FILES[model] = [file for file in files if hasattr(file, model_compat.EAGER_ATTENTION)]
    return _FILES[model]


@functools.cache
def _watched_sdpa(original: Callable) -> Callable:
    def packed(call: WatchedCall, module: nn.Module, options: dict[str, Any], *tensors: Any) -> Tensor:
        options, window = call.masked(module, options)
        return varlen_attention(module, *tensors, **{**options, "sliding_window": window})

    return _watched_attention(original, packed, traced_attention)


@functools.cache
def _watched_eager(original: Callable) -> Callable:
    def packed(call: WatchedCall, module: nn.Module, options: dict[str, Any], *tensors: Any) -> Tensor:
        options, window = call.masked(module, options)
        return eager_attention(EagerLayer(original, module, options, window, call.mask_dtype, call.memo), *tensors)

    return _watched_attention(original, packed)


@functools.cache
def _watched_flash(original: Callable) -> Callable:
    def packed(
        _: WatchedCall, module: nn.Module, options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        key, value = gathered_keys(key, value, options.pop("shared_prefix_kv", None))
        return original(module, query, key, value, None, **options)[0]

    return _watched_attention(original, packed)


def _not_traced(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError("only attention through SDPA is compiled")


def _watched_attention(
    original: Callable, packed: Callable[..., Tensor], traced: Callable[..., Tensor] = _not_traced
) -> Callable:
    """
    One of transformers' attention functions, watched, with another one for `packed` rows, which takes the call, the
    layer, its keyword arguments, query, key and value, and returns `[1, S, heads, D]`, and the one that torch's
    compiler sees (`traced`).
    """
    names = list(inspect.signature(original).parameters)[5:]

    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        if torch.compiler.is_compiling():
            return traced(module, query, key, value, attention_mask, **kwargs), None
        kwargs = with_carried_arguments(kwargs)
        # Packed rows bring their call: none runs when a layer is computed again, whoever checkpoints it
        watched: WatchedCall | None = kwargs.pop("watched", None)
        call = watched or running_call.get()
        options: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        if call is not None:
            call.look_at(module, query, attention_mask, options)
        if watched is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if are_sequence_masks(attention_mask, watched.lengths):
            own = {name: option for name, option in options.items() if name not in PACKED_ARGUMENTS}
            return attend_with_masks(original, module, query, key, value, attention_mask, watched.lengths, own), None
        return packed(watched, module, options, query, key, value), None

    return attention


@functools.cache
def _watched_mask(original: Callable) -> Callable:
    """One of transformers' mask functions, watched. Our attention replaces theirs: packed rows need no mask."""

    @functools.wraps(original)
    def mask(*args, **kwargs):
        call = running_call.get()
        if call is None:
            return original(*args, **kwargs)
        if call.open_mask is not None:
            return call.open_mask(original(*args, **kwargs))
        mask_function = kwargs.get("mask_function", causal_mask_function)
        call.read_mask(mask_function, kwargs.get("dtype"))
        if not args and call.needs_sequence_masks(mask_function):
            return build_sequence_masks(original, call.lengths, kwargs)
        if not args and call.keeps_masks:
            return call.keep_mask(original, kwargs, mask_device(kwargs))
        return None

    return mask
