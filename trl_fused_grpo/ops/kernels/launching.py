"""Launches of Triton kernels that cost the CPU little."""

from typing import Any

import torch
import triton
from torch import Tensor


_MOST = 2**31 - 1  # larger integers have another type in a kernel
# Before, what was compiled took the other arguments alone; for AMD's it is compiled for sizes of tensors too
_KEEPS_COMPILED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3) and torch.version.hip is None


class Launcher:
    """
    Launches a Triton kernel. Triton looks at every argument at every launch, to find what it has compiled for such
    arguments: for a kernel of 20 arguments that takes the CPU longer than a layer's tensors keep the GPU busy. Here
    what was compiled is found by the dtypes of the tensors and by what else Triton compiles for.

    Args:
        kernel (`JITFunction`): takes tensors, then numbers, then constants.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[int | bool, ...],
        warps: int,
    ) -> None:
        """
        Launch on the device of the tensors.

        Args:
            programs (`int`): how many.
            tensors, numbers, constants (`tuple`): the kernel's arguments.
            warps (`int`): of each program.
        """
        device = tensors[0].device
        if device.type != "cuda":  # the interpreter
            self.kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
            return
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current one
                self(programs, tensors, numbers, constants, warps)
            return
        # Triton compiles for each dtype, for addresses and integers that are multiples of 16, for ones, for large ones
        kinds = [(number == 1) + 2 * (number % 16 == 0) + 4 * (number > _MOST) for number in numbers]
        is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
        key = (device.index, warps, constants, *[tensor.dtype for tensor in tensors], *kinds)
        compiled = self._compiled.get(key) if is_aligned else None
        if compiled is not None:
            compiled[(programs, 1, 1)](*tensors, *numbers, *constants)
            return
        compiled = self.kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
        if is_aligned and _KEEPS_COMPILED:
            self._compiled[key] = compiled
