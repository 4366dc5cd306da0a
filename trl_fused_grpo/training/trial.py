"""
Trials of a model at its first batch. Does a sequence in a packed row have the hidden states that it has alone? And
where the model's code is not known: are its results the same without TRL's padding?
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError, HiddenStatesRequest
from trl_fused_grpo.modeling.layout import Rows
from trl_fused_grpo.modeling.multimodal import MultimodalInputs

from .customised_model import own_class, row_reader, zero_weight
from .logps import PromptsNotSharedError, RowsRefusedError, RowsWithImages, compute_logps, lay_out, run_model
from .logps_request import LogpsArgs, LogpsOptions, LogpsRequest


_ROWS_TRIED = 4
_FIRST_TOKENS = 8  # of a sequence: what leaks into it over a boundary is seen there best
_MOST_ROUNDING = 0.1  # of hidden states, relative: more than this is no rounding
_NOISE = 8  # how many times the rounding error a difference must be to count as one


def try_packing(
    call: LogpsArgs, options: LogpsOptions, images: MultimodalInputs | None, on_any_process: Callable[[bool], bool]
) -> bool:
    """
    Compare the hidden states of the shortest sequences of a batch, each alone, with those of the same sequences in one
    packed row, in the precision that trains, without dropout and without gradient.

    The sequence that stands first in the row shows how much rounding alone makes of it. A model mixes sequences when
    each of the others differs by more than several times that. A process whose batch cannot tell calls the model as
    often as the others, and hears what they found.

    Args:
        call ([`LogpsArgs`]): the batch.
        options ([`LogpsOptions`]): with packed rows.
        images ([`MultimodalInputs`], *optional*): of the batch.
        on_any_process (`Callable`): whether a condition holds on any process, so that all decide alike.

    Returns:
        `bool`: whether the batch of any process could tell. It needs two sequences without holes in their masks.

    Raises:
        [`CuSeqlensIgnoredError`]: when the model mixes sequences.
        [`RowsRefusedError`]: when it asks for more of its attention than packed rows give.
        [`PromptsNotSharedError`]: when sequences must not share a prompt.
    """
    selected = call.attention_mask[:, -call.logits_to_keep :].bool()
    with_images = [] if images is None else images.rows_with_images
    if options.processes > 1 or len(with_images) > 1:  # all processes must run the vision tower as often
        tried = _shortest_sequences(call, selected, with_images)
    else:
        tried = _shortest_sequences(call, selected)
    can_tell = len(tried) > 1
    count = next((n for n in range(_ROWS_TRIED, 1, -1) if on_any_process(len(tried) >= n)), 0)
    if not count:
        return False
    if not can_tell:  # any tokens will do
        call, tried = replace(call, attention_mask=torch.ones_like(call.attention_mask)), with_images[:1] or [0]
    alone_options = replace(options, share_prompts=False)
    refusals: list[RowsRefusedError | PromptsNotSharedError] = []

    def hidden_states(rows: list[int], options: LogpsOptions) -> list[Tensor]:
        index = torch.tensor(rows, device=call.input_ids.device)
        of_rows = None if images is None else RowsWithImages(images, options, call)
        layout = lay_out(options, call, index, selected[index], of_rows)
        try:
            (hidden,) = run_model(call.model, layout, HiddenStatesRequest())
        except (RowsRefusedError, PromptsNotSharedError) as error:
            refusals.append(error)  # raised when all processes have called the model as often
            return []
        assert layout.logit_positions is not None, "the layout is packed"
        flat = torch.cat([layout.logit_positions[i][selected[row]] for i, row in enumerate(rows)])
        return hidden.flatten(0, 1)[flat].float().split([int(selected[row].sum()) for row in rows])

    modules = [module for module in call.model.modules() if module.training]
    with torch.no_grad(), random_states_kept(call.input_ids), _in_evaluation(modules):
        together = hidden_states(tried, options)
        alone = [hidden_states([tried[i % len(tried)]], alone_options) for i in range(count)]
    for kind in (RowsRefusedError, PromptsNotSharedError):
        mine = next((error for error in refusals if isinstance(error, kind)), None)
        if on_any_process(mine is not None):
            raise mine or kind("another process found it out")
    _compare(together, [own for (own,) in alone], can_tell, _compute_dtype(call, options), on_any_process)
    return True


def _shortest_sequences(call: LogpsArgs, selected: Tensor, among: Sequence[int] = ()) -> list[int]:
    """
    The rows of a few sequences without holes, of which `selected` `[B, T]` has tokens; the shortest, `among` some rows
    if any are given.
    """
    mask = call.attention_mask.bool()
    padded = Rows(call.input_ids, call.attention_mask, call.logits_to_keep, selected, selected.any(1))
    lengths = (mask.sum(1) * selected.any(1)).masked_fill(padded.with_holes(mask), 0)
    order = [row for length, row in sorted(zip(lengths.tolist(), range(len(lengths)), strict=True)) if length]
    order = [row for row in order if not among or row in among]
    return sorted(order[:_ROWS_TRIED])


def _compare(
    together: Sequence[Tensor],
    alone: Sequence[Tensor],
    can_tell: bool,
    dtype: torch.dtype,
    on_any_process: Callable[[bool], bool],
) -> None:
    """Raise where hidden states `[n, H]` of sequences in one row differ from those of each alone, on any process."""
    found = "its hidden states change when other sequences stand before them in the row"
    mixes = False
    if can_tell:
        errors = [_relative_error(mine, other) for mine, other in zip(together, alone, strict=False)]
        eps = torch.finfo(dtype).eps
        limit = max(_NOISE * min(errors[0], _MOST_ROUNDING, 1000 * eps), 4 * eps)
        mixes = not min(errors[1:]) <= limit
        found += f" (by {min(errors[1:]):.1e}, where rounding makes {errors[0]:.1e})"
    if on_any_process(mixes):
        raise CuSeqlensIgnoredError(found)


def _relative_error(value: Tensor, reference: Tensor) -> float:
    """How far hidden states `[n, H]` are from others, over all tokens or over the first few, whichever is more."""
    squares, sizes = (value - reference).square().sum(1), reference.square().sum(1)
    parts = (squares.sum(), sizes.sum()), (squares[:_FIRST_TOKENS].sum(), sizes[:_FIRST_TOKENS].sum())
    return max(float((error / size.clamp(min=1e-30)).sqrt()) for error, size in parts)


def _compute_dtype(call: LogpsArgs, options: LogpsOptions) -> torch.dtype:
    device_type = call.input_ids.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else options.causal_lm.dtype


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Generator[None, None, None]:
    """While it lasts, modules that are in training are not: no dropout, no noise. Nobody's `train()` is called."""
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


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
    eps = torch.finfo(_compute_dtype(call, options)).eps
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
