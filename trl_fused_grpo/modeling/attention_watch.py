"""Watches what a model asks of its attention: rows lose TRL's padding only where that changes no result."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trl_fused_grpo._compat import models as model_compat


_FURTHER_OPTIONS = [name for name in model_compat.SDPA_ARGUMENTS if name not in ("dropout", "scaling", "is_causal")]


class WatchedCall:
    """
    What is seen of a model's attention while it runs on rows that are not padded as TRL pads them.

    It is no dataclass on purpose: mixed-precision wrappers rebuild the dataclasses and containers in keyword arguments.

    Args:
        packed (`bool`): whether the rows are packed; otherwise they are aligned.

    Attributes:
        layers (`int`): attention layers that were called with packed sequences.
        windows (`set`): the sliding windows of the masks that the model asked for; `None` is a mask without.
        reason (`str`, *optional*): why the rows must have TRL's padding.
        open_mask (`Callable`, *optional*): makes of a mask what the model gets, where rows have TRL's padding.
    """

    def __init__(self, packed: bool):
        self.packed, self.layers = packed, 0
        self.windows: set[int | None] = set()
        self.reason: str | None = None
        self.open_mask: Callable[[Any], Any] | None = None
        self._has_built_masks = False

    def refuse(self, reason: str) -> None:
        """Remember the first reason. The model runs on to its end: hooks of FSDP and ZeRO count its layers."""
        self.reason = self.reason or reason

    def read_mask(self, mask_function: Any) -> None:
        """Look at a mask that the model asks for: its sliding window, and whether it hides anything else."""
        parts = model_compat.mask_parts(mask_function)
        kinds = dict(parts)
        if "unknown" in kinds:
            self.refuse(f"its mask is more than causality and a window ({kinds['unknown']})")
        elif "causal" not in kinds:
            self.refuse("its mask is not causal")
        elif "chunk" in kinds and self.packed:
            self.refuse("its mask has chunks")
        self.windows.add(min((tokens for kind, tokens in parts if kind == "window"), default=None))

    def note_built(self, mask: Any) -> Any:
        """Note whether transformers built the mask or left it to the attention function, and return it."""
        self._has_built_masks |= mask is not None
        return mask if self.open_mask is None else self.open_mask(mask)

    def look_at(self, module: nn.Module, query: Tensor, attention_mask: Any, options: dict[str, Any]) -> None:
        """Look at one attention call: does it ask for more than causality, a sliding window and a scale?"""
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if options.get("dropout"):
            self.refuse("its attention drops out")
        elif attention_mask is not None and (self.packed or (self.windows and not self._has_built_masks)):
            self.refuse("its layers make masks of their own")
        elif attention_mask is None and query.shape[2] > 1 and not is_causal:
            self.refuse("its attention is not causal")
        for name in _FURTHER_OPTIONS:
            if options.get(name) is not None:
                self.refuse(f"its attention takes {name}")

    def window(self, module: Any, passed: int | None) -> int | None:
        """
        The sliding window of a layer, in tokens. In stock SDPA heeds the mask alone, whatever window the layer passes
        on. Which mask a layer gets is known where all are alike, or from the model's `layer_types`.
        """
        windows = self.windows or {None}
        layer_types = getattr(getattr(module, "config", None), "layer_types", None)
        index = getattr(module, "layer_idx", None)
        if len(windows) > 1 and layer_types is not None and index is not None:
            windows = windows - {None} if layer_types[index] == "sliding_attention" else {None}
        if len(windows) == 1:
            return next(iter(windows))
        if passed not in windows:
            self.refuse("it has masks with several windows, and which layers they are for is not known")
        return passed
