"""States of the random number generators, which a trial or a comparison leaves as they were."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStates:
    """
    States of the random number generators of the CPU and of a tensor's device.

    Args:
        like (`Tensor`): on the device.
    """

    def __init__(self, like: Tensor):
        self._device = like.device
        self._cpu_state = torch.get_rng_state()
        self._device_state = torch.cuda.get_rng_state(self._device) if like.is_cuda else None

    def are_current(self) -> bool:
        """Whether no random number was drawn since."""
        if not torch.equal(torch.get_rng_state(), self._cpu_state):
            return False
        state = self._device_state
        return state is None or torch.equal(torch.cuda.get_rng_state(self._device), state)

    def restore(self) -> None:
        """Set the generators to what they were."""
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            torch.cuda.set_rng_state(self._device_state, self._device)


@contextmanager
def random_states_kept(like: Tensor) -> Generator[None, None, None]:
    """Afterwards random numbers go on as if nothing had been drawn."""
    before = RandomStates(like)
    try:
        yield
    finally:
        before.restore()
