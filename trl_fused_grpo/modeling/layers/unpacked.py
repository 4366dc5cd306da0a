"""
Layers of which each sequence of a packed row needs a row of its own.

A layer with a state (short convolution, Mamba, gated delta rule) would carry that of one sequence into the next.
Attention that does not go through transformers' interface, or that chooses its keys by an indexer, knows nothing of
packed sequences. The input of such a layer is unpacked before it runs, and its output is packed again: each sequence
gets a row that begins at column zero. A causal layer does not see what stands behind a sequence, so that the result is
the same, whatever kernel computes it.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._utils import temporary_attr, temporary_value
from trl_fused_grpo.modeling.attention.masks import build_mask
from trl_fused_grpo.modeling.attention.watch import PACKED_ARGUMENTS, KeptMask, WatchedCall, running_call

from .forward_override import override_forward, restore_forward
from .memo import LayerMemo
from .sequence_rows import SequenceRows


class UnpackedLayers(NamedTuple):
    """The layers of a model that run unpacked."""

    with_state: list[nn.Module]  # those that carry a state along the sequence
    attention: list[nn.Module]  # attention that reads the model's mask by itself
    checkpointed: list[nn.Module]  # the modules of the text model that can checkpoint; empty where nothing is unpacked


@LayerMemo
def unpacked_layers(causal_lm: PreTrainedModel) -> UnpackedLayers:
    """The layers of a model that run unpacked in packed rows, as far as they are known here."""
    text_model = architecture.text_model(causal_lm)
    with_state: dict[str, nn.Module] = {}
    for name, module in text_model.named_modules():  # outer modules come first
        if architecture.carries_state(module) and not any(name.startswith(f"{outer}.") for outer in with_state):
            with_state[name] = module
    attention = architecture.attention_with_masks(text_model)
    is_any = bool(with_state or attention)
    checkpointed = [m for m in text_model.modules() if is_any and hasattr(m, "gradient_checkpointing")]
    return UnpackedLayers(list(with_state.values()), attention, checkpointed)


def install_unpacking(causal_lm: PreTrainedModel) -> None:
    """Have such layers of a model run unpacked wherever they are called with packed rows. Idempotent."""
    layers = unpacked_layers(causal_lm)
    for module in (*layers.with_state, *layers.attention):
        override_forward(module, _run_unpacked)


def uninstall_unpacking(causal_lm: PreTrainedModel) -> None:
    """Undo [`install_unpacking`]. Idempotent."""
    layers = unpacked_layers(causal_lm)
    for module in (*layers.with_state, *layers.attention):
        restore_forward(module)


@contextmanager
def unpacking(causal_lm: PreTrainedModel, call: WatchedCall | None) -> Generator[None, None, None]:
    """
    While it lasts, the backbone of a model runs on the packed row that `call` watches. Layers that are computed again
    in backward are unpacked there too: what they checkpoint holds the call.
    """
    layers = unpacked_layers(causal_lm)
    if call is None or not (layers.with_state or layers.attention):
        yield
        return
    call.keeps_masks = bool(layers.attention)
    name = model_compat.CHECKPOINT_FUNCTION
    with ExitStack() as stack:
        for layer in layers.checkpointed:
            if hasattr(layer, name):
                function = functools.partial(_checkpoint_with_call, getattr(layer, name), call)
                stack.enter_context(temporary_attr(layer, name, function))
        yield


def _checkpoint_with_call(checkpoint: Callable, call: WatchedCall, function: Callable, *inputs: Any) -> Any:
    return checkpoint(functools.partial(_run_with_call, call, function), *inputs)


def _run_with_call(call: WatchedCall | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
    with temporary_value(running_call, call):
        return function(*args, **kwargs)


def _run_unpacked(layer: nn.Module, original: Callable, *args: Any, **kwargs: Any) -> Any:
    call = running_call.get()
    if call is None or not call.lengths:
        return original(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in PACKED_ARGUMENTS}
    rows = _rows_of(call, layer)
    columns = [_unpacked(value, call, rows) for value in (*args, *kwargs.values())]
    results = []
    for group in range(rows.groups):
        values = [column[group] for column in columns]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        # Nobody watches what it asks of attention: its rows are no packed ones
        results.append(_run_with_call(None, original, *values[: len(args)], **named))
    return rows.pack(results)


def _unpacked(value: Any, call: WatchedCall, rows: SequenceRows) -> list[Any]:
    """An argument of a layer for each group of rows."""
    kept = call.kept_mask(value)
    return rows.unpack(value) if kept is None else [_mask(kept, call, *index.shape) for index in rows.indices]


def _mask(kept: KeptMask, call: WatchedCall, count: int, width: int) -> Tensor:
    """The mask `[count, 1, width, width]` that the layer would get for rows without padding."""
    key = ("mask", id(kept.stand_in), width)
    if key not in call.memo:
        call.memo[key] = build_mask(kept.original, kept.options, 0, width)
    return call.memo[key].expand(count, -1, -1, -1)


def _rows_of(call: WatchedCall, layer: nn.Module) -> SequenceRows:
    parameter = next(layer.parameters())
    if parameter.device not in call.memo:
        # ZeRO-3 gathers weights whenever a module is called, so that it must be called as often on every process
        most_groups = 1 if hasattr(parameter, "ds_id") else None
        call.memo[parameter.device] = SequenceRows(call.lengths, parameter.device, most_groups)
    return call.memo[parameter.device]
