"""
Trials of a model at its first batch. Do sequences that share rows have the hidden states that each has alone? And where
the model's code is not known: are its log-probs the same without TRL's padding?
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import models as models_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError, HiddenStatesRequest
from trl_fused_grpo.modeling.layout import Layout
from trl_fused_grpo.modeling.multimodal import MultimodalInputs

from .buffers import Buffers, buffers_kept
from .customised_model import code_of, modules_of_unknown_code, zero_weight
from .logps import PromptsNotSharedError, RowsRefusedError, RowsWithImages, compute_logps, lay_out, run_model
from .logps_request import LogpsArgs, LogpsOptions, LogpsRequest
from .random_states import random_states_kept
from .trial_precision import in_float32, rounding_of, runs_in_float32
from .trial_rows import ROWS_TRIED, few_sequences, narrowed, prompts_of


_FIRST_TOKENS = 8  # of a sequence: what leaks into it over a boundary is seen there best
_MOST_ROUNDING = 0.03  # of hidden states, relative: more than this is no rounding
_MOST_IN_FLOAT32 = 1e-4  # the same where training rounds to fewer bits: 28 layers made 3e-6
_NOISE = 8  # how many times the rounding error a difference must be to count as one


class Tried:
    """Which trials a model has had, as long as its code is the same."""

    def __init__(self) -> None:
        self._code: frozenset[Any] = frozenset()
        self._names: set[Any] = set()

    def by(self, modules: Iterable[nn.Module], processes: int) -> set[Any]:
        """
        The trials of a model with these modules: none if one has become of another class since, or calls another
        function. Who replaces a function, as to log its calls, may do so on the main process alone, and a trial runs on
        all: functions count in one process.
        """
        code = code_of(modules, counts_functions=processes == 1)
        if code != self._code:
            self._code, self._names = code, set()
        return self._names


def try_rows(
    call: LogpsArgs, options: LogpsOptions, images: MultimodalInputs | None, on_any_process: Callable[[bool], bool]
) -> bool:
    """
    Compare the hidden states of short sequences of a batch, each alone in TRL's padding (as far as [`narrowed`] keeps
    it), with those of the same sequences together in a layout, without dropout and without gradient: in the precision
    that trains, and before that in float32 where autocast rounds weights that are. Where the layout was asked for, each
    is alone in this layout: whoever asks for it says that padding does not matter.

    Nothing stands before the first sequence in a packed row: it shows how much rounding makes. A model mixes sequences
    when each of the others differs by more than several times that, or each that shares its prompt with one before. A
    process whose batch cannot tell calls the model as often as the others, and hears what they found.

    Args:
        call ([`LogpsArgs`]): the batch.
        options ([`LogpsOptions`]): with the layout to try.
        images ([`MultimodalInputs`], *optional*): of the batch.
        on_any_process (`Callable`): whether a condition holds on any process, so that all decide alike.

    Returns:
        `bool`: whether the batch of any process could tell. It needs two sequences without holes in their masks,
            whose images are known.

    Raises:
        [`CuSeqlensIgnoredError`]: when packed rows mix sequences.
        [`RowsRefusedError`]: when aligned rows do, or when the model asks for more of its attention than rows give.
        [`PromptsNotSharedError`]: when sequences must not share a prompt.
    """
    if on_any_process(images is not None and not images.are_known_by_row):
        return False
    selected = call.attention_mask[:, -call.logits_to_keep :].bool()
    with_images = [] if images is None else images.rows_with_images
    if options.processes > 1 or len(with_images) > 1:  # all processes must run the vision tower as often
        tried = few_sequences(call, selected, with_images)
    else:
        tried = few_sequences(call, selected)
    can_tell = len(tried) > 1
    count = next((n for n in range(ROWS_TRIED, 1, -1) if on_any_process(len(tried) >= n)), 0)
    if not count:
        return False
    if not can_tell:  # any tokens will do
        call, tried = replace(call, attention_mask=torch.ones_like(call.attention_mask)), with_images[:1] or [0]
    elif images is None and not options.needs_last_column:
        call = narrowed(call, tried)
        selected = selected[:, : call.logits_to_keep]
    compared = _Compared(call, options, images, selected, tried, count, on_any_process)
    difference = None
    prompts = prompts_of(call) if options.share_prompts else range(len(selected))
    prompts = [prompts[row] for row in tried]
    if runs_in_float32(call, options):  # in one process: nobody waits for what is left out
        exact = in_float32(compared.errors, options.causal_lm, call.input_ids.device.type)
        difference = None if exact is None else _difference(exact, prompts, _MOST_IN_FLOAT32)
    if difference is None:
        found = compared.errors()
        if can_tell:
            difference = _difference(found, prompts, min(128 * rounding_of(call, options), _MOST_ROUNDING))
    if not on_any_process(difference is not None):
        return True
    how = f"({difference or 'found on another process'})"
    if options.layout == "packed":
        raise CuSeqlensIgnoredError(f"its hidden states change when sequences share a row {how}")
    raise RowsRefusedError(f"its hidden states change when rows lose TRL's padding {how}")


@dataclass
class _Compared:
    """
    Sequences that are compared, each alone and all together in a layout.

    Args:
        call ([`LogpsArgs`]): the batch.
        options ([`LogpsOptions`]): with the layout.
        images ([`MultimodalInputs`], *optional*): of the batch.
        selected (`Tensor`): `[B, T]`, the completion tokens whose log-probs are asked for.
        rows (`list[int]`): of the sequences.
        count (`int`): how many run alone on every process, whatever the number of `rows` here.
        on_any_process (`Callable`): whether a condition holds on any process.
    """

    call: LogpsArgs
    options: LogpsOptions
    images: MultimodalInputs | None
    selected: Tensor
    rows: list[int]
    count: int
    on_any_process: Callable[[bool], bool]

    def errors(self) -> list[float]:
        """How far the hidden states of each sequence together are from those alone, relative."""
        options, model, refusals = self.options, self.call.model, []
        alone = replace(options, layout=options.layout if options.forces_layout else "padded", share_prompts=False)
        modules = [module for module in model.modules() if module.training and models_compat.may_evaluate(module)]
        kept = buffers_kept(modules_of_unknown_code(model.modules()))
        with torch.no_grad(), random_states_kept(self.call.input_ids), kept, _in_evaluation(modules):
            together = self._hidden_states(self.rows, options, refusals)
            # Twice: transformers < 5.2 or so heeds no mask in layers with a state where a batch has one row
            copies = 2 if alone.layout == "padded" else 1
            turns = ([self.rows[i % len(self.rows)]] * copies for i in range(self.count))
            each = [self._hidden_states(rows, alone, refusals) for rows in turns]
        for kind in (RowsRefusedError, PromptsNotSharedError):
            mine = next((error for error in refusals if isinstance(error, kind)), None)
            if self.on_any_process(mine is not None):
                raise mine or kind("another process found it out")
        return [_relative_error(mine, own) for mine, (own, *_) in zip(together, each, strict=False)]

    def _hidden_states(self, rows: list[int], options: LogpsOptions, refusals: list[Exception]) -> list[Tensor]:
        """Those `[n, H]` that predict the completion of each row; what the model refuses goes to `refusals`."""
        call, selected = self.call, self.selected
        index = torch.tensor(rows, device=call.input_ids.device)
        of_rows = None if self.images is None else RowsWithImages(self.images, options, call)
        layout = lay_out(options, call, index, selected[index], of_rows)
        try:
            (hidden,) = run_model(call.model, layout, HiddenStatesRequest())
        except (RowsRefusedError, PromptsNotSharedError) as error:
            refusals.append(error)  # raised when all processes have called the model as often
            return []
        finally:
            trl_compat.forget_order_of_modules(call.model)
        places = _places(layout, hidden, call.logits_to_keep)
        return [hidden.flatten(0, 1)[places[i][selected[row]]].float() for i, row in enumerate(rows)]


def _places(layout: Layout, hidden: Tensor, completion_length: int) -> Tensor:
    """Flat positions `[b, T]` in the hidden states `[B, L, H]` of the tokens before those of the completions."""
    if layout.logit_positions is not None:
        return layout.logit_positions
    rows, width = hidden.shape[:2]  # the last columns of rows in TRL's padding
    columns = torch.arange(width - completion_length - 1, width - 1, device=hidden.device)
    return torch.arange(rows, device=hidden.device).unsqueeze(1) * width + columns


def _difference(errors: Sequence[float], prompts: Sequence[int], most: float) -> str | None:
    """
    How far the hidden states of sequences in rows are from those of each alone; `None` for rounding.

    Args:
        errors (`Sequence[float]`): of each sequence, relative.
        prompts (`Sequence[int]`): a number for the prompt of each, the same for those that share it in a row.
        most (`float`): that rounding may make, relative.
    """
    limit = max(_NOISE * min(errors[0], most), most)  # the first may be right to the last bit
    sharing = [error for i, error in enumerate(errors) if prompts[i] in prompts[:i]]
    found = max(min(errors[1:]), min(sharing, default=0.0))
    return f"by {found:.1e}, where rounding makes {min(limit, errors[0]):.1e}" if found > limit else None


def _relative_error(value: Tensor, reference: Tensor) -> float:
    """How far hidden states `[n, H]` are from others, over all tokens or over the first few, whichever is more."""
    squares, sizes = (value - reference).square().sum(1), reference.square().sum(1)
    parts = (squares.sum(), sizes.sum()), (squares[:_FIRST_TOKENS].sum(), sizes[:_FIRST_TOKENS].sum())
    return max(float((error / size.clamp(min=1e-30)).sqrt()) for error, size in parts)


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
    unknown: str | None,
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
        unknown (`str`, *optional*): what of their code is not known, on any process.
        call ([`LogpsArgs`]): whose first rows are tried.
        options ([`LogpsOptions`]): with the layout to try.
        on_any_process (`Callable`): whether a condition holds on any process, so that all decide alike.

    Raises:
        [`RowsRefusedError`]: when they differ, or when a difference could not be seen yet.
    """
    if unknown is None:
        return
    gate = zero_weight(modules)
    if on_any_process(gate is not None):
        raise RowsRefusedError(f"a weight of {gate or unknown} is still zero: what its code makes of rows is not seen")
    with buffers_kept(modules_of_unknown_code(modules)) as buffers:
        difference = _difference_from_padded(call, options)
        counting = None if difference is None else _counting_module(call, options, buffers)
    if difference is None:
        return
    if on_any_process(counting is not None):
        raise RowsRefusedError(f"{counting or unknown} changes its buffers in each forward")
    eps = rounding_of(call, options)
    if on_any_process(not difference <= max(1e-3, 32 * eps)):
        raise RowsRefusedError(f"{unknown}, whose code is not known, makes other log-probs of rows without it")


def _counting_module(call: LogpsArgs, options: LogpsOptions, buffers: Buffers) -> str | None:
    """
    The class of a module that changes its buffers in each forward, or `None`. One that fills a table, which is long
    enough from then on, changes them once.
    """
    for _ in range(2 if buffers else 0):
        buffers.count()
        # Some count the forwards that have a gradient. Wrappers of several processes would wait for its backward
        _difference_from_padded(call, options, with_gradient=options.processes == 1)
    return buffers.changed()


def _difference_from_padded(call: LogpsArgs, options: LogpsOptions, with_gradient: bool = False) -> Tensor | None:
    """The largest difference of log-probs, a scalar in nats. `None` where the model refuses the layout by itself."""
    rows = few_sequences(call, call.attention_mask[:, -call.logits_to_keep :].bool())
    index = torch.tensor(rows or range(len(call.input_ids))[:ROWS_TRIED], device=call.input_ids.device)
    ids, mask = call.input_ids[index], call.attention_mask[index]
    few = replace(call, input_ids=ids, attention_mask=mask, compute_entropy=False, compute_aux_loss=False)
    completion_mask = mask[:, -call.logits_to_keep :]
    with torch.set_grad_enabled(with_gradient), random_states_kept(call.input_ids):
        try:
            logps = [
                compute_logps(LogpsRequest(completion_mask), replace(options, layout=layout), few, None).logps.detach()
                for layout in (options.layout, "padded")
            ]
        except (RowsRefusedError, CuSeqlensIgnoredError):
            return None  # the call that follows is refused too, and says why
    return ((logps[0] - logps[1]) * completion_mask).abs().max()
