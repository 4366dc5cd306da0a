"""A trial of a model whose code is not known: are its results the same without TRL's padding?"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError

from .customised_model import own_class, row_reader, zero_weight
from .logps import RowsRefusedError, compute_logps
from .logps_request import LogpsArgs, LogpsOptions, LogpsRequest


_ROWS_TRIED = 4


def try_layout(
    causal_lm: PreTrainedModel,
    modules: Sequence[nn.Module],
    call: LogpsArgs,
    options: LogpsOptions,
    on_any_process: Callable[[bool], bool],
) -> None:
    """
    Compare, in a model with code of its own, the log-probs of a few rows in a layout with those in TRL's padding. A
    model of known code is not run.

    Args:
        causal_lm (`PreTrainedModel`): the causal language model.
        modules (`Sequence[nn.Module]`): those of the model, wrappers included.
        call ([`LogpsArgs`]): whose first rows are tried.
        options ([`LogpsOptions`]): with the layout to try.
        on_any_process (`Callable`): whether a condition holds on any process, so that all decide alike.

    Raises:
        [`RowsRefusedError`]: when they differ, or when a difference could not be seen yet.
    """
    unknown = own_class(modules) or row_reader(modules)
    if unknown is None:
        return
    gate = zero_weight(modules)
    if on_any_process(gate is not None):
        raise RowsRefusedError(f"a weight of {gate or unknown} is still zero: what its code makes of rows is not seen")
    difference = _difference_from_padded(call, options)
    if difference is None:
        return
    device = call.input_ids.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    eps = torch.finfo(dtype or causal_lm.dtype).eps
    if on_any_process(not difference <= max(1e-3, 32 * eps)):
        raise RowsRefusedError(f"{unknown}, whose code is not known, makes other log-probs of rows without it")


def _difference_from_padded(call: LogpsArgs, options: LogpsOptions) -> Tensor | None:
    """The largest difference of log-probs, a scalar in nats. `None` where the model refuses the layout by itself."""
    ids, mask = call.input_ids[:_ROWS_TRIED], call.attention_mask[:_ROWS_TRIED]
    few = replace(call, input_ids=ids, attention_mask=mask, compute_entropy=False, compute_aux_loss=False)
    completion_mask = mask[:, -call.logits_to_keep :]
    with torch.no_grad(), random_states_kept(call.input_ids):
        try:
            logps = [
                compute_logps(LogpsRequest(completion_mask), replace(options, layout=layout), few, None).logps
                for layout in (options.layout, "padded")
            ]
        except (RowsRefusedError, CuSeqlensIgnoredError):
            return None  # the call that follows is refused too, and says why
    return ((logps[0] - logps[1]) * completion_mask).abs().max()


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
