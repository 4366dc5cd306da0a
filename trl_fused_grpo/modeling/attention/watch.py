"""Watches what a model asks of its attention: rows lose TRL's padding only where that changes no result."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trl_fused_grpo._compat import models as model_compat

from .masks import are_sequence_masks
from .varlen import chunked


# The keyword arguments that tell the layers of a model about packed sequences
PACKED_ARGUMENTS = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("shared_prefix_kv", "watched"),
)
_CARRIED = "packed_arguments"


def carry_arguments(model_inputs: dict[str, Any]) -> None:
    """
    Let the positions of packed rows carry the arguments that tell of their sequences: some models hand positions on to
    their layers, and nothing else that they do not know.
    """
    arguments = {name: value for name, value in model_inputs.items() if name in PACKED_ARGUMENTS}
    setattr(model_inputs["position_ids"], _CARRIED, arguments)


def with_carried_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a layer or its attention, with those that its positions carry where they are missing."""
    if "watched" in kwargs:
        return kwargs
    return {**kwargs, **getattr(kwargs.get("position_ids"), _CARRIED, {})}


class Chunk(NamedTuple):
    """A mask under which a token sees those of its own chunk: so many `tokens`, from the first of the sequence on."""

    tokens: int


# What limits the mask of a layer of a type, beside causality
_KIND_OF_LAYER: dict[str, type] = {"sliding_attention": int, "chunked_attention": Chunk}


class KeptMask(NamedTuple):
    """How transformers would build a mask of the packed row."""

    stand_in: Tensor  # what the model got in its place
    original: Callable  # transformers' mask function
    options: dict[str, Any]  # its arguments


# The call that watches the model which runs in this thread
running_call: ContextVar["WatchedCall | None"] = ContextVar("running_call", default=None)


class WatchedCall:
    """
    What is seen of a model's attention while it runs on packed rows, or on padded ones whose masks are opened.

    It is no dataclass on purpose: mixed-precision wrappers rebuild the dataclasses and containers in keyword arguments.
    """

    def __init__(
        self,
        lengths: list[int] | None = None,  # tokens of each sequence in a packed row
        has_images: bool = False,  # whether the row has images, whose tokens a mask may treat in its own way
        shares_prompts: bool = False,  # whether sequences in the row may attend to a prompt elsewhere in it
        open_mask: Callable[[Any], Any] | None = None,
    ):
        self.lengths, self.open_mask = lengths or [], open_mask
        self.has_images, self.shares_prompts, self.needs_own_prompts = has_images, shares_prompts, False
        self.windows: set[int | Chunk | None] = set()
        self.memo: dict[Any, Any] = {}
        self.keeps_masks, self._kept_masks = False, dict[int, KeptMask]()
        self.mask_dtype: torch.dtype | None = None
        self.reason: str | None = None

    def refuse(self, reason: str) -> None:
        """Remember the first reason. The model runs on to its end: hooks of FSDP and ZeRO count its layers."""
        self.reason = self.reason or reason

    def read_mask(self, mask_function: Any, dtype: torch.dtype | None = None) -> None:
        """Look at a mask that the model asks for: its sliding window, and whether it hides anything else."""
        self.mask_dtype = dtype
        parts = model_compat.mask_parts(mask_function)
        kinds = dict(parts)
        if self.needs_sequence_masks(mask_function):
            self.needs_own_prompts |= self.shares_prompts  # the rule counts places in the row
            return
        if "unknown" in kinds:
            self.refuse(f"its mask is more than causality and a window ({kinds['unknown']})")
        elif "causal" not in kinds:
            self.refuse("its mask is not causal")
        elif "chunk" in kinds and "window" in kinds:
            self.refuse("its mask has chunks and a window")
        window = min((tokens for kind, tokens in parts if kind == "window"), default=None)
        self.windows.add(Chunk(kinds["chunk"]) if "chunk" in kinds else window)

    def needs_sequence_masks(self, mask_function: Any) -> bool:
        """Return `True` if the mask of packed rows with images is more than causality, windows and chunks."""
        return self.has_images and "unknown" in dict(model_compat.mask_parts(mask_function))

    def keep_mask(self, original: Callable, options: dict[str, Any], device: torch.device) -> Tensor:
        """What the model gets in place of a mask of the packed row: [`kept_mask`] finds by it how to build one."""
        stand_in = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._kept_masks[id(stand_in)] = KeptMask(stand_in, original, options)
        return stand_in

    def kept_mask(self, mask: Any) -> "KeptMask | None":
        """The mask that a tensor stands in for, or `None`."""
        return self._kept_masks.get(id(mask))

    def look_at(self, module: nn.Module, query: Tensor, attention_mask: Any, options: dict[str, Any]) -> None:
        """Look at one attention call: does it ask for more than causality, a sliding window and a scale?"""
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if options.get("dropout"):
            self.refuse("its attention drops out")
        elif self.kept_mask(attention_mask) is not None:
            pass  # its rows are packed, and the layer's attention knows where sequences begin
        elif self.has_images and are_sequence_masks(attention_mask, self.lengths):
            pass
        elif attention_mask is not None:
            self.refuse("its layers make masks of their own")
        elif query.shape[2] > 1 and not is_causal:
            self.refuse("its attention is not causal")
        for name in model_compat.FURTHER_SDPA_ARGUMENTS:
            if options.get(name) is not None:
                self.refuse(f"its attention takes {name}")

    def masked(self, module: Any, options: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """
        The keyword arguments of a layer or its attention, where chunks are sequences if the layer's mask has them, and
        its sliding window in tokens.
        """
        window = self.window(module, options.get("sliding_window"))
        if not isinstance(window, Chunk):
            return options, window
        if window not in self.memo:  # the same in every layer
            self.memo[window] = chunked(options, window.tokens)
        return {**options, **self.memo[window]}, None

    def window(self, module: Any, passed: int | None) -> int | Chunk | None:
        """
        The sliding window of a layer, in tokens, or its chunk. In stock SDPA heeds the mask alone, whatever window the
        layer passes on. Which mask a layer gets is known where all are alike, or from the model's `layer_types`.
        """
        windows = self.windows or {None}
        layer_types = getattr(getattr(module, "config", None), "layer_types", None)
        index = getattr(module, "layer_idx", None)
        if len(windows) > 1 and layer_types is not None and index is not None:
            kind = _KIND_OF_LAYER.get(layer_types[index], type(None))
            windows = {window for window in windows if isinstance(window, kind)}
        if len(windows) == 1:
            return next(iter(windows))
        if passed not in windows:
            self.refuse("it has masks with several windows, and which layers they are for is not known")
        return passed
