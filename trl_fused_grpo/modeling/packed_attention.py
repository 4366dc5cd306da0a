"""
Packed rows in models that take transformers' attention interface: our attention and mask functions stand in its tables
while a forward, or the backward of its graph, needs them.
"""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from trl_fused_grpo._compat import models as model_compat

from .attention_watch import WatchedCall
from .varlen_attention import varlen_attention


_call: ContextVar[WatchedCall | None] = ContextVar("watched_call", default=None)
# The watched calls that are alive, by `id`. One lives as long as something refers to it: the forward that it watches,
# or a checkpointed layer that will be computed again in backward and holds the keyword arguments of its first call
_living: set[int] = set()
_lock = threading.RLock()  # backward lets go of watched calls in autograd's threads


@contextmanager
def watched_call(packed: bool) -> Generator[WatchedCall, None, None]:
    """
    While it lasts, what models ask of attention is watched. Where rows are packed, models build no attention masks:
    keyword arguments say where the sequences begin ([`cu_seqlens_arguments`]).

    Until the call that it yields is let go, our functions stand in transformers' tables. Give the call to the model as
    `watched` where rows are packed: layers that are computed again in backward hold it as long as they need them.
    """
    call = WatchedCall(packed)
    _install_while_alive(call)
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


@contextmanager
def cudnn_attention_off() -> Generator[None, None, None]:
    """
    While it lasts, SDPA does not take cuDNN's kernel, which returns NaN gradients for rows that are masked whole, as
    left padding is. A backward that computes checkpointed layers again needs it too. Without CUDA nothing happens.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def why_replaced(implementation: str) -> str | None:
    """Why transformers' attention of this name is not the one that packed rows stand for, or `None`."""
    tables = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
    for kind, table in tables.items():
        function = table.get(implementation)
        if function is not None and not (_is_ours(function) or model_compat.is_transformers_own(function)):
            return f"the {kind} function registered as {implementation!r} is not transformers' own"
    return None


def _is_ours(function: Any) -> bool:
    return getattr(function, "__globals__", None) is globals()


def uninstall_attention() -> None:
    """
    Take our functions out of transformers' tables, unless the graph of a packed forward still needs them in backward.

    They go by themselves when the last forward and the last such graph do; this finds those that garbage holds.
    Idempotent.
    """
    if _living:
        gc.collect()


def _install_while_alive(call: WatchedCall) -> None:
    """
    Let transformers' `"sdpa"` attention heed where packed sequences begin, and watch which masks models ask for, while
    `call` lives. Other calls of these functions get what they always got. A function that is not transformers' own
    stays as it is.
    """
    with _lock:
        _living.add(id(call))
        for interface, name, replacement in _REPLACEMENTS:
            registered = interface()[name]  # a new instance shows the table that all share
            if model_compat.is_transformers_own(registered):
                interface.register(name, replacement(registered))
    weakref.finalize(call, _let_go, id(call)).atexit = False


def _let_go(number: int) -> None:
    """Forget a watched call; with the last one transformers has its own functions back."""
    with _lock:
        _living.discard(number)
        if _living:
            return
        for interface, name, _ in _REPLACEMENTS:
            registered: Any = interface()[name]
            if _is_ours(registered):  # what the user has registered since then stays
                interface.register(name, registered.__wrapped__)


@functools.cache
def _with_cu_seqlens(original: Callable) -> Callable:
    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask, *args, watched: WatchedCall | None = None, **kwargs):
        running = _call.get()  # there is none when a checkpointed layer is computed again
        options: dict[str, Any] = {**dict(zip(model_compat.SDPA_ARGUMENTS, args, strict=False)), **kwargs}
        call = running if watched is None else watched
        if call is not None:
            call.look_at(module, query, attention_mask, options)
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if running is not None:
            running.layers += 1
            if watched is None:
                cu_seqlens.watched = running  # layers of a model that drops `watched` hold the call by this
        if call is not None:
            options["sliding_window"] = call.window(module, options.get("sliding_window"))
        return varlen_attention(module, query, key, value, **options), None

    return attention


@functools.cache
def _watched_mask(original: Callable, is_sdpa: bool = False) -> Callable:
    @functools.wraps(original)
    def mask(*args, **kwargs):
        call = _call.get()
        if call is None:
            return original(*args, **kwargs)
        call.read_mask(kwargs.get("mask_function", causal_mask_function))
        built = None if call.packed and is_sdpa else original(*args, **kwargs)
        return call.note_built(built)

    return mask


# Whose table, under which name, and what stands there in place of transformers' own function
_REPLACEMENTS: tuple[tuple[Any, str, Callable], ...] = (
    (AttentionInterface, "sdpa", _with_cu_seqlens),
    (AttentionMaskInterface, "sdpa", functools.partial(_watched_mask, is_sdpa=True)),
    (AttentionMaskInterface, "eager", _watched_mask),
    (AttentionMaskInterface, "flex_attention", _watched_mask),
)
