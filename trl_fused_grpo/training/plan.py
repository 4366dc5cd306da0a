"""
The plan of a generation batch, made once when TRL has made the batch: which micro-batches share a forward, in training
and for the log-probs that generation has left out. And why it is not more: facts of the options and of library code,
which are no levels. Each of these functions returns the reason as words that follow "because", or `None`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture, trainers
from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import peft as peft_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.layers.memo import LayerMemo
from trl_fused_grpo.modeling.rows.layout import Rows, first_with_the_prompt

from .findings import Findings, Level, replaced_objective
from .requests import can_join_images, objective_of, padding_counts


@dataclass(frozen=True)
class Forward:
    """A forward that micro-batches share."""

    places: range  # of its micro-batches, see [`Plan`]
    # It fits the memory of TRL's padding only while no weight has a gradient
    needs_free_gradients: bool = False


@dataclass(frozen=True)
class Plan:
    """What is done with a generation batch."""

    micro_batches: tuple[dict[str, Any], ...] = ()  # as TRL keeps them
    # From the place of the first micro-batch that is trained on to the end, without a gap. Places count on through the
    # iterations: a batch of four micro-batches and `num_iterations=2` has eight
    forwards: tuple[Forward, ...] = ()

    def micro_batch(self, place: int) -> dict[str, Any]:
        """The micro-batch at a place."""
        return self.micro_batches[place % len(self.micro_batches)]

    def sharing(self, forward: Forward) -> list[dict[str, Any]]:
        """The micro-batches that share a forward, in order."""
        return [self.micro_batch(place) for place in forward.places]

    def forward_at(self, place: int) -> Forward | None:
        """The forward that begins at a place, or `None`."""
        return next((forward for forward in self.forwards if forward.places[0] == place), None)

    @property
    def first_iteration(self) -> tuple[Forward, ...]:
        """The forwards in which each micro-batch is trained on for the first time."""
        end = self.forwards[0].places[0] + len(self.micro_batches)
        return tuple(forward for forward in self.forwards if forward.places[0] < end)


def plan_forwards(
    ends: list[int], ends_of_first: list[int], places: range, steps_left: int, accumulation: int, begins_window: bool
) -> tuple[Forward, ...]:
    """
    Which micro-batches of a generation batch share a forward. None does beyond an accumulation window or an iteration.
    `ends` has for each micro-batch the last one that fits a forward from it on, `ends_of_first` that where weights have
    no gradients yet; `steps_left` until the window ends is 0 where it is not known.

    Forwards are filled from a window's end. The first, which may have the most tokens, gets what is left: a small last
    one would take the CPU as long, while the GPU waits.
    """
    forwards, place, count = list[Forward](), places.start, len(ends)
    while place < places.stop:
        if steps_left == 0:
            steps_left, begins_window = accumulation, True
        number = place % count
        last_of_first = (ends_of_first if begins_window else ends)[number]
        stop = end = min(number + steps_left, count)
        shared = list[range]()  # the numbers of each forward's micro-batches, from the window's end
        while end - 1 > last_of_first:
            start = next(start for start in range(number + 1, end) if ends[start] >= end - 1)
            shared.append(range(start, end))
            end = start
        shared.append(range(number, end))
        for numbers in reversed(shared):
            needs_free_gradients = numbers[-1] > ends[numbers[0]]
            forwards.append(Forward(range(place, place + len(numbers)), needs_free_gradients))
            place += len(numbers)
        steps_left, begins_window = steps_left - (stop - number), False
    return tuple(forwards)


def last_that_fit(batches: list[dict[str, Any]], limits: Iterable[int], share_prompts: bool) -> list[list[int]]:
    """
    For each limit of tokens, and each micro-batch of a generation batch, the number of the last one that may share its
    forward of packed rows. None do where a row has holes in its mask: such rows keep TRL's padding.
    """
    tokens_from = token_counter(batches, share_prompts)
    if tokens_from is None:
        return [list(range(len(batches))) for _ in limits]

    def end_of(start: int, limit: int) -> int:
        end = start
        for number, tokens in enumerate(tokens_from(start), start):
            if tokens > limit or not can_join_images(batches[start : number + 1]):
                break
            end = number
        return end

    return [[end_of(start, limit) for start in range(len(batches))] for limit in limits]


def token_counter(batches: list[dict[str, Any]], share_prompts: bool) -> Callable[[int], Iterator[int]] | None:
    """
    A function that yields the tokens of the micro-batches from an index on, up to each of them: a prompt's once if they
    share it. `None` where a row has holes in its mask.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    count = len(prompt_ids)
    mask = prompt_mask.bool()
    prompts = first_with_the_prompt(prompt_ids, mask) if share_prompts else torch.arange(count, device=mask.device)
    of_rows = prompts, mask.sum(1), completion_mask.sum(1), _holes(prompt_mask, completion_mask)
    prompts, prompt_lengths, lengths, has_holes = torch.stack(of_rows).tolist()  # the only synchronisation
    if any(has_holes):
        return None
    sequences_of = [rows.tolist() for rows in torch.arange(count).split([len(b["prompt_ids"]) for b in batches])]

    def tokens_from(start: int) -> Iterator[int]:
        total, seen = 0, set()
        for sequences in sequences_of[start:]:
            for row in sequences:
                total += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
                seen.add(prompts[row])
            yield total

    return tokens_from


def _holes(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Which sequences `[B]`, bool, have holes in their masks `[B, P]` and `[B, T]`."""
    selected, mask = completion_mask.bool(), torch.cat([prompt_mask, completion_mask], dim=1)
    in_model = selected.any(1)
    rows = Rows(mask, mask, completion_mask.shape[1], selected, in_model)  # token ids do not matter
    return rows.with_holes(mask.bool() & in_model.unsqueeze(1))


# Why not more


def why_forwards_are_not_shared(trainer: Any, findings: Findings, packed: bool) -> str | None:
    """Why micro-batches whose rows are `packed`, or not, may not share a forward of the model, or `None`."""
    if (reason := findings.why_below(Level.WINDOW)) is not None:
        return reason
    if not packed:
        return "rows keep TRL's padding"
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss is computed in each micro-batch"
    if trainer.is_deepspeed_enabled and trl_compat.DEEPSPEED_STEPS_WITH_BACKWARD:
        return "this version of Accelerate steps DeepSpeed's engine at every backward"
    return None


_MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@LayerMemo
def why_padding_is_mixed_in(causal_lm: PreTrainedModel) -> str | None:
    """
    Why what attention returns at padding may reach the tokens of a sequence in a model of library code, or `None`. Then
    it must be what it is in stock.
    """
    for module in causal_lm.modules():
        if isinstance(module, PreTrainedModel):
            has_state = (
                model_compat.is_stateful(module) or not architecture.layer_types(module.config) <= _MASKED_LAYERS
            )
            if has_state or module.config.model_type in model_compat.PADDING_MATTERS:
                return "a state may take padding in"
    return None


def has_old_logps(trainer: Any) -> bool:
    """Return `True` if batches have old log-probs, of generation or of the training forward."""
    if trainers.is_rloo(trainer) or trainers.corrects_sampling(trainer):
        return True
    # Else TRL computes them where the weights may move while a generation batch is in use
    return trainer.args.gradient_accumulation_steps % trl_compat.steps_of_generation_batch(trainer) != 0


def why_old_logps_are_needed(trainer: Any, findings: Findings) -> str | None:
    """
    Why old log-probs must be computed during generation; `None` where, until the weights move, the training forward
    gives the same numbers, and nobody else reads them.
    """
    if trainers.is_rloo(trainer) and trainer.beta != 0.0:
        return f"with beta={trainer.beta} RLOO's KL penalty in the reward reads them"
    return (
        findings.why_below(Level.WINDOW)
        or why_forwards_differ(trainer.model)
        or why_rows_depend_on_others(trainer.model)
    )


def why_reference_is_not_regrouped(trainer: Any, findings: Findings, packed: bool) -> str | None:
    """
    Why the reference's log-probs are computed during generation, as TRL does; `None` where they are computed
    afterwards, in the same rows and groups of micro-batches as the policy's.
    """
    if trainer.beta == 0.0:
        return "there is no reference"
    if trainers.is_rloo(trainer):
        return "RLOO's KL penalty in the reward reads its log-probs"
    if not packed:
        return "rows have TRL's padding, in which all micro-batches have one shape"
    reason = findings.why_below(Level.WINDOW) or why_rows_depend_on_others(trainer.model)
    if reason is None and trainer.ref_model is None:
        # TRL shuffles the sequences of a generation batch after the reference's forwards, which draw for each row
        reason = why_forwards_differ(trainer.model, with_adapters=False)
    return reason


def why_no_forecast(trainer: Any) -> str | None:
    """
    Why a batch of the training may have no forecast of its gradients, and after a colon what to change; `None` where
    the gradient of each token follows from the log-probs of its sequence.
    """
    method = replaced_objective(trainer)
    if method is not None:
        return f"what {method} does to the gradient is not known: remove it"
    if objective_of(trainer).top_entropy_quantile < 1.0:
        return "the entropy quantile looks at the whole batch: set top_entropy_quantile=1.0"
    if padding_counts(trainer):
        return "this TRL's luspo counts padding: use TRL 1.10 or newer, or another loss_type"
    return None


def why_zero_grad_sequences_are_not_skipped(trainer: Any, packed: bool) -> str | None:
    """Why `fused_skip_zero_grad_sequences` cannot leave a sequence out of the model, or `None`."""
    if trl_compat.has_aux_loss(trainer):
        return "the auxiliary loss counts every sequence"
    if trainers.beta_of_loss(trainer) != 0.0:
        return f"with beta={trainer.beta} every sequence receives a gradient from the KL term"
    if trl_compat.has_entropy_bonus(trainer):
        return "every sequence receives a gradient from the entropy bonus"
    reason = why_no_forecast(trainer)
    if reason is not None:
        return f"it needs to know which sequences receive a gradient, and {reason}"
    if objective_of(trainer).loss_type == "vespo" and has_old_logps(trainer):
        return "vespo logs a weight of every sequence"
    if not packed:
        return "rows are not packed: only the head leaves them out"
    return None


# Parts, weights and hooks of a module: dictionaries that hold no options
_OF_EVERY_MODULE = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
# torch's own that draw nothing: most of the thousands that adapters bring
_DRAW_NOTHING = frozenset({nn.Linear, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict})


def why_forwards_differ(model: nn.Module, with_adapters: bool = True) -> str | None:
    """
    Why two forwards of the same rows give different numbers in training, or `None`: library modules draw at random.
    """
    modules = torch_compat.modules_of(model)
    if not with_adapters:
        not_called = peft_compat.dropouts_of_adapters(modules)
        modules = [module for module in modules if module not in not_called]
    for module in modules:
        if type(module) in _DRAW_NOTHING:
            continue
        if _drops_out(module):
            return f"dropout ({_name_in(model, module)}) makes two forwards differ"
        if (noise := model_compat.noise_of(module)) is not None:
            return f"{noise} makes two forwards differ"
        if module.training and (option := _noise_option(vars(module))) is not None:
            return f"dropout ({_name_in(model, module)}.{option}) makes two forwards differ"
    config = getattr(model, "config", None)
    option = _noise_option(config.to_dict()) if model.training and hasattr(config, "to_dict") else None
    return f"dropout ({option}) makes two forwards differ" if option else None


def why_rows_depend_on_others(model: nn.Module) -> str | None:
    """
    Why log-probs of a sequence depend on which are beside it, or `None`: TRL shuffles the sequences of a generation
    batch after it has computed them.
    """
    configs = [module.config for module in torch_compat.modules_of(model) if isinstance(module, PreTrainedModel)]
    return next(filter(None, map(architecture.why_rows_depend_on_others, configs)), None)


def _drops_out(module: nn.Module) -> bool:
    """
    Return `True` if a module is a dropout that is on: torch's, or another of that name, as of PEFT's OFT and BOFT.
    """
    is_dropout = isinstance(module, torch_compat.Dropout) or "Dropout" in type(module).__name__
    if not (is_dropout and module.training):  # thousands, of which few have a `p`
        return False
    probability = getattr(module, "p", None)
    return isinstance(probability, (int, float)) and probability > 0


def _name_in(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)


def _noise_option(options: dict[str, Any]) -> str | None:
    """
    The first option of a configuration, of one nested in it, or of a module that draws random numbers: a probability of
    dropout, a strength of router jitter. Attention passes its dropout to a function, each family by its own name.
    PEFT's LoHa and LoKr keep theirs by the name of the adapter.
    """
    for name, value in options.items():
        values = (value,)
        if isinstance(value, dict) and name not in _OF_EVERY_MODULE:
            if (nested := _noise_option(value)) is not None:
                return nested
            values = value.values()
        if "drop" in str(name) or "jitter" in str(name):
            is_on = any(isinstance(one, float) and one > 0 for one in values)
            if is_on and name not in architecture.DROPOUTS_OF_OTHER_HEADS:
                return name
    return None
