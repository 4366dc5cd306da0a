"""Findings about a model, kept as long as its layers are the same."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._utils import walks_once


T = TypeVar("T")


class LayerMemo(Generic[T]):
    """
    Keeps what a function finds out about a model: a walk over all modules takes as long as a layer. When the user
    replaces a decoder layer, or a part of one, as a projection, the function is called again.
    """

    def __init__(self, find_out: Callable[[PreTrainedModel], T]):
        self._find_out = find_out
        self._kept: WeakKeyDictionary[PreTrainedModel, tuple[list[ref[nn.Module]], T]] = WeakKeyDictionary()

    def __call__(self, causal_lm: PreTrainedModel) -> T:
        """The finding about a model."""
        parts = _layers_and_their_parts(causal_lm)
        kept = self._kept.get(causal_lm)
        if kept is None or kept[0] != parts:  # of the same living modules, references are equal
            kept = self._kept[causal_lm] = parts, self._find_out(causal_lm)
        return kept[1]


def layers_of(text_model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a text model."""
    return [layer for child in text_model.children() if isinstance(child, nn.ModuleList) for layer in child]


@walks_once
def _layers_and_their_parts(causal_lm: PreTrainedModel) -> list[ref[nn.Module]]:
    layers = layers_of(architecture.text_model(causal_lm))
    parts = _children_of(layers)
    return [ref(part) for part in (*layers, *parts, *_children_of(parts))]


def _children_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Asked for at every call of the model: `children()` takes longer
    return [child for module in modules for child in module._modules.values() if child is not None]
