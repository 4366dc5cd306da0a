"""
Micro-batches that share a forward of the model. The first of them runs it. Each takes its log-probs and its loss in a
training step of its own. The backward of all runs with the last of them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.layout import LayoutName, Rows
from trl_fused_grpo.modeling.layout_choice import traits

from .agreement import of_all_processes, with_images_anywhere
from .checks import is_possible
from .eligibility import why_forwards_are_not_shared, why_micro_batches_are_seen, why_not_balanced
from .engine import LogpsEngine
from .exchange import exchanged
from .logps_request import PerTokenLogps, can_join_images, images_of
from .partitioning import default_token_budget, prompt_group_ids, rebalance, rows_by_width, widths_of


logger = logging.get_logger(__name__)


class MicroBatchMerger:
    """
    Decides which micro-batches of a generation batch share a forward. Keeps their log-probs until each has its step,
    and their losses until the backward.

    Args:
        trainer (`GRPOTrainer`): whose micro-batches they are.
        engine ([`LogpsEngine`]): knows its options and how its rows are laid out.

    Attributes:
        is_rebalanced (`bool`): whether the sequences of the generation batch were partitioned anew (`fused_balance`).
        layout (`str`): the layout for which it was decided which micro-batches share a forward.
    """

    def __init__(self, trainer: GRPOTrainer, engine: LogpsEngine):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.engine = engine
        self.is_rebalanced = False
        self.reset()

    def reset(self) -> None:
        """Forget all micro-batches, as at the start of a training."""
        self.set_plan([], [])
        self._losses: list[Tensor] = []

    def plan_generation(self, batches: list[dict[str, Any]], steps_left: int) -> list[dict[str, Any]]:
        """
        Decide which micro-batches of a new generation batch share forwards.

        Args:
            batches (`list[dict]`): as TRL has split them.
            steps_left (`int`): micro-batches until the current accumulation window ends.

        Returns:
            `list[dict]`: the micro-batches, as they were or with their sequences partitioned anew.
        """
        trainer, options = self.trainer, self.engine.options
        causal_lm = self.engine.causal_lm(trainer.model)
        with_images = with_images_anywhere(trainer.accelerator, causal_lm, [bool(images_of(b)) for b in batches])
        layout = self.engine.layout(trainer.model, is_multimodal=any(with_images))
        shares_prompts = self.engine.shares_prompts(trainer.model)
        reason = why_micro_batches_are_seen(trainer)
        if reason is not None:
            logger.warning_once(f"Every micro-batch has a forward of its own, because {reason}.")
        max_tokens, ends = options.fused_max_tokens_per_forward, []
        asked_for = "fused_max_tokens_per_forward" if max_tokens else None
        is_shared = is_possible(asked_for, why_forwards_are_not_shared(trainer, layout))
        if not any(with_images):
            batches = exchanged(self.engine, batches, layout, steps_left, is_shared)
        if options.fused_balance and is_possible("fused_balance", why_not_balanced(trainer)):
            rebalanced = rebalance(batches, layout, shares_prompts)
            self.is_rebalanced, batches = rebalanced is not batches, rebalanced
        if is_shared:
            max_tokens = default_token_budget(batches) if max_tokens is None else max_tokens
            needs_last_column = traits(causal_lm).needs_last_column
            processes = trainer.accelerator.num_processes
            in_one_width = needs_last_column or processes > 1
            ends = plan_merges(batches, max_tokens, shares_prompts, layout, needs_last_column, in_one_width)
            # Every process must call the model at the same steps
            ends = of_all_processes(trainer.accelerator, ends).amin(0).tolist()
        self.set_plan(batches, ends, layout, with_images)
        return batches

    def set_plan(
        self,
        batches: list[dict[str, Any]],
        ends: list[int],
        layout: LayoutName = "packed",
        with_images: list[bool] | None = None,
    ) -> None:
        """
        Replace the plan by that of a new generation batch. Log-probs of the one before are dropped.

        Args:
            batches (`list[dict]`): its micro-batches.
            ends (`list[int]`):
                For each, the index of the last one that may share its forward. Where the list is empty, each has a
                forward of its own.
            layout (`str`): the layout of their rows, for which tokens were counted.
            with_images (`list[bool]`, *optional*): for each, whether it has images on any process.
        """
        self._with_images = with_images or []
        self._batches, self._ends, self.layout = batches, ends, layout
        self._logps: dict[int, PerTokenLogps] = {}
        self._last = -1

    def group_of(self, inputs: dict[str, Any], steps_left: int) -> list[dict[str, Any]]:
        """
        The micro-batches that share a forward whose first one is `inputs`, in order.

        Args:
            inputs (`dict`): a micro-batch of the trainer. One that is not of the generation batch is alone.
            steps_left (`int`): micro-batches until the accumulation window ends, this one included.
        """
        index = self._index_of(inputs)
        if index is None or not self._ends:
            return [inputs]
        end = min(self._ends[index], index + steps_left - 1)
        return [inputs, *self._batches[index + 1 : end + 1]]

    def groups(self, steps_left: int) -> list[list[dict[str, Any]]]:
        """
        All micro-batches of the generation batch, grouped by the forward that they will share.

        Args:
            steps_left (`int`): micro-batches until the current accumulation window ends.
        """
        groups, index = [], 0
        while index < len(self._batches):
            if steps_left == 0:
                steps_left = self.trainer.args.gradient_accumulation_steps
            groups.append(self.group_of(self._batches[index], steps_left))
            index += len(groups[-1])
            steps_left -= len(groups[-1])
        return groups

    def keep(self, inputs: dict[str, Any], logps: list[PerTokenLogps]) -> None:
        """Keep the log-probs of micro-batches that shared a forward, the first of which is `inputs`."""
        index = self._index_of(inputs)
        if index is not None and len(logps) > 1:
            self._logps = dict(enumerate(logps, index))
            self._last = max(self._logps)

    def take_logps(self, inputs: dict[str, Any]) -> PerTokenLogps | None:
        """Remove and return the log-probs that an earlier forward left for these inputs, or `None`."""
        index = self._index_of(inputs)
        return None if index is None else self._logps.pop(index, None)

    def is_multimodal(self, inputs: dict[str, Any]) -> bool | None:
        """Whether these inputs have images on any process; `None` where that is not known."""
        index = self._index_of(inputs)
        return self._with_images[index] if index is not None and self._with_images else None

    @property
    def is_waiting(self) -> bool:
        """Whether losses wait for the last micro-batch of their forward."""
        return bool(self._losses)

    def backward(self, loss: Tensor, inputs: dict[str, Any], moves_weights: bool, backward: Callable) -> None:
        """
        Run the backward of a loss together with those that wait for it, or keep the loss for the last micro-batch of
        its forward.

        Args:
            loss (`Tensor`): a scalar, as TRL gives it to the backward.
            inputs (`dict`): its micro-batch.
            moves_weights (`bool`): whether the weights move after it.
            backward (`Callable`): the accelerator's.
        """
        self._losses.append(loss)
        index = self._index_of(inputs)
        if index is not None and index < self._last and not moves_weights:
            return
        losses, self._losses = self._losses, []
        self._logps, self._last = {}, -1
        backward(losses[0] if len(losses) == 1 else torch.stack(losses).sum())

    def _index_of(self, inputs: dict[str, Any]) -> int | None:
        """The index of these inputs in the generation batch, by identity; `None` for others."""
        return next((index for index, batch in enumerate(self._batches) if batch is inputs), None)


@contextmanager
def reducing_gradients(model: nn.Module) -> Generator[None, None, None]:
    """
    While it lasts, a forward under DDP's `no_sync` prepares for gradients to be reduced: the backward of a shared
    forward runs in a later step, which reduces them.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with temporary_attr(model, "require_backward_grad_sync", True):
        yield


def plan_merges(
    batches: list[dict[str, Any]],
    limit: int,
    share_prompts: bool,
    layout: LayoutName = "packed",
    needs_last_column: bool = False,
    in_one_width: bool = False,
) -> list[int]:
    """
    Decide which micro-batches of a generation batch may share a forward. None do where a row has holes in its mask:
    such rows keep TRL's padding.

    Args:
        batches (`list[dict]`): the micro-batches, all of one width.
        limit (`int`): most tokens that several may have together.
        share_prompts (`bool`): whether a prompt counts once, in packed rows.
        layout (`str`): `"packed"` or `"aligned"`, whose rows are as long as the longest of their width.
        needs_last_column (`bool`): see [`layout_choice.Traits`].
        in_one_width (`bool`): whether aligned rows are counted as wide as the longest of all.

    Returns:
        `list[int]`: for each micro-batch, the index of the last one that may share its forward.
    """
    names = ("prompt_ids", "prompt_mask", "completion_mask")
    prompt_ids, prompt_mask, completion_mask = (torch.cat([batch[name] for batch in batches]) for name in names)
    count, is_packed = len(prompt_ids), layout == "packed"
    prompts = prompt_group_ids(prompt_ids, prompt_mask) if share_prompts and is_packed else list(range(count))
    holes = _holes(prompt_mask, completion_mask)
    # Rows that must reach TRL's last column are counted from their first token on
    columns = (prompt_mask.cumsum(1) > 0).sum(1) + completion_mask.shape[1]
    counts = torch.stack([prompt_mask.sum(1), completion_mask.sum(1), columns, holes])
    prompt_lengths, lengths, columns, has_holes = counts.tolist()
    if any(has_holes):
        return list(range(len(batches)))
    sequences_of = torch.arange(count).split([len(batch["prompt_ids"]) for batch in batches])
    whole = columns if needs_last_column else [sum(pair) for pair in zip(prompt_lengths, lengths, strict=True)]

    ends = []
    for start in range(len(batches)):
        tokens = _packed_tokens(prompts, prompt_lengths, lengths) if is_packed else _aligned_tokens(whole, in_one_width)
        end = start
        for index, sequences in enumerate(sequences_of[start:], start):
            if tokens(sequences.tolist()) > limit or not can_join_images(batches[start : index + 1]):
                break
            end = index
        ends.append(end)
    return ends


def _packed_tokens(prompts: list[int], prompt_lengths: list[int], lengths: list[int]) -> Callable[[list[int]], int]:
    """A function that is given one micro-batch after the other and returns their tokens so far: a prompt's once."""
    total, seen = 0, set()

    def tokens(sequences: list[int]) -> int:
        nonlocal total
        for row in sequences:
            total += lengths[row] + (0 if prompts[row] in seen else prompt_lengths[row])
            seen.add(prompts[row])
        return total

    return tokens


def _aligned_tokens(lengths: list[int], in_one_width: bool) -> Callable[[list[int]], int]:
    """The same for aligned rows, padding included; `in_one_width` where all are as wide as the longest."""
    so_far: list[int] = []
    micro_batches = 0

    def tokens(sequences: list[int]) -> int:
        nonlocal micro_batches
        micro_batches += 1
        so_far.extend(lengths[row] for row in sequences)
        return rows_by_width(so_far, 1 if in_one_width else widths_of(micro_batches))[1]

    return tokens


def _holes(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Which sequences `[B]`, bool, have holes in their masks `[B, P]` and `[B, T]`."""
    selected, mask = completion_mask.bool(), torch.cat([prompt_mask, completion_mask], dim=1)
    in_model = selected.any(1)
    rows = Rows(mask, mask, completion_mask.shape[1], selected, in_model)  # token ids do not matter
    return rows.with_holes(mask.bool() & in_model.unsqueeze(1))
