"""A function of tensors, compiled once for each kind of them, and called as it is where that cannot be."""

import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from trl_fused_grpo._compat import torch as torch_compat


logger = logging.get_logger(__name__)

# Kinds of tensors for which functions of one name are compiled; those that come later are not
MOST_VARIANTS = 24
# How often each name was compiled, for whoever wants to know what a start-up was spent on
compilations: Counter[str] = Counter()
_variants: Counter[str] = Counter()


class CompiledFunction:
    """
    A function of tensors, compiled with dynamic shapes. The last dimension of the first tensor, the number of
    dimensions, those of size one and what autograd and autocast do make a variant, which is compiled by itself: nothing
    is compiled again as long as they stay the same.

    What a variant does is decided when it is first called, and does not change: a layer that is computed again in
    backward must save what its forward has saved.

    Args:
        name (`str`): what is compiled, in words of the log.
        function (`Callable`): takes tensors, has no side effects.
    """

    needs_compiler = True

    def __init__(self, name: str, function: Callable):
        self.name, self.function = name, function
        self._compiled: dict[Any, Callable | None] = {}

    def __call__(self, tensors: tuple[Tensor, ...], original: Callable[[], Any]) -> Any:
        """The function of these tensors, compiled, or what `original` returns."""
        key = _key(tensors)
        if key is None:
            return original()
        if key not in self._compiled:
            return self._first_call(key, tensors, original)
        compiled = self._compiled[key]
        if compiled is None:
            return original()
        try:
            return compiled(*tensors)
        except torch_compat.compiler_errors() as error:  # of other sizes than before
            self._tell(error)
            return original()

    def _first_call(self, key: Any, tensors: tuple[Tensor, ...], original: Callable[[], Any]) -> Any:
        if _variants[self.name] >= MOST_VARIANTS:
            logger.warning_once(
                f"{self.name} runs without the compiler where its input is of new kinds, because it was compiled for "
                f"{MOST_VARIANTS} kinds already."
            )
            self._compiled[key] = None
            return original()
        _variants[self.name] += 1
        compiled = torch.compile(self._of_own_code(tensors), dynamic=True, fullgraph=True, backend=self._backend)
        try:
            with torch_compat.whole_graphs():
                result = compiled(*tensors)
        except torch_compat.compiler_errors() as error:
            self._tell(error)
            self._compiled[key] = None
            return original()
        self._compiled[key] = compiled
        return result

    def _tell(self, error: Exception) -> None:
        reason = " ".join(str(error).split("\n")[:2])
        logger.warning_once(
            f"{self.name} runs without the compiler, because torch cannot compile it here: {type(error).__name__}: "
            f"{reason}"
        )

    def _backend(self, graph: Any, example_inputs: Any) -> Any:
        compilations[self.name] += 1
        return torch_compat.inductor(graph, example_inputs)

    def _of_own_code(self, tensors: tuple[Tensor, ...]) -> Callable:
        """The function with static widths, and with a code object of its own: what torch compiles is kept by code."""
        function, width = self.function, tensors[0].shape[-1]

        def compiled(first: Tensor, *others: Tensor) -> Any:
            assert first.shape[-1] == width  # a reduction over a width that is known is faster
            return function(first, *others)

        code = compiled.__code__.replace(co_name=f"fused_{self.name}_{_variants[self.name]}")
        return types.FunctionType(code, compiled.__globals__, code.co_name, None, compiled.__closure__)


def _key(tensors: tuple[Tensor, ...]) -> Any:
    """What a variant is made for; `None` for tensors that the compiler should not see."""
    if torch.is_inference_mode_enabled() or torch.compiler.is_compiling() or torch_compat.operations_are_seen():
        return None
    kinds = []
    for tensor in tensors:
        kind = type(tensor)
        if (kind is not Tensor and kind is not torch.nn.Parameter) or not tensor.numel() or tensor.is_complex():
            return None
        shape = tensor.shape
        kinds.append((tensor.dtype, tensor.device, tensor.requires_grad, tuple([size == 1 for size in shape])))
    device_type = tensors[0].device.type
    cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return torch.is_grad_enabled(), cast, tensors[0].shape[-1], *kinds
