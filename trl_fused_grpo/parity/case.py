"""What a comparison is made of: a configuration and the data that goes in."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias


MARK = 17  # a token of [`Rollout.marked`]

Trainer: TypeAlias = Any  # a GRPOTrainer; its attributes depend on the host's version


class SkippedError(Exception):
    """The case does not apply here: the message says why."""


@dataclass(frozen=True)
class Batch:
    """
    What goes into micro-batches that are handed to the trainer as they are.

    Attributes:
        old (`str`, *optional*):
            Old log-probs: `None` leaves them out, `"policy"` gives the current ones, `"far"` moves them so that part of
            the ratios lies beyond each clip bound, `"drifted"` moves whole rows beyond one bound or the other.
        ratio (`str`, *optional*):
            vLLM importance ratios: `"report"` as in the bug report, one value of mean 0.005 a sequence.
        reference (`bool`):
            Whether reference log-probs are given.
        sampling (`bool`):
            Whether the sampler's log-probs are given.
        tool_mask (`bool`):
            Whether some completion tokens were written by a tool.
        token_advantages (`bool`):
            Whether advantages have shape `[B, T]` instead of `[B]`.
        empty_rows (`tuple[int, ...]`):
            Rows without a single completion token.
        empty_micro_batches (`tuple[int, ...]`):
            Micro-batches whose every completion token is masked.
        images (`str`, *optional*):
            Model family whose images stand in the prompts.
    """

    old: Literal["policy", "far", "drifted"] | None = None
    ratio: Literal["report"] | None = None
    reference: bool = False
    sampling: bool = False
    tool_mask: bool = False
    token_advantages: bool = False
    empty_rows: tuple[int, ...] = ()
    empty_micro_batches: tuple[int, ...] = ()
    images: str | None = None


@dataclass(frozen=True)
class Rollout:
    """
    Completions that the host scores itself: rewards, advantages, masks, old and reference log-probs, vLLM ratios.

    Attributes:
        sampling (`str`, *optional*):
            Sampler's log-probs: `"token"` spreads the per-token ratios over both clip bounds, `"sequence"` the
            per-sequence ones. `None`: the sampler gives none, as when transformers generates.
        nan (`bool`):
            Whether some tokens could not be scored by the sampler.
        env_mask (`bool`):
            Whether some completion tokens were written by an environment.
        truncated_rows (`tuple[int, ...]`):
            Rows that stop without an end-of-sequence token.
        uneven (`bool`):
            Whether a few sequences are much longer than the others, so that two packed micro-batches have fewer tokens
            than a padded one and share a forward by default.
        marked (`bool`):
            Whether the token [`MARK`] is the last but one of every prompt.
    """

    sampling: Literal["token", "sequence"] | None = None
    nan: bool = False
    env_mask: bool = False
    truncated_rows: tuple[int, ...] = ()
    uneven: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Customisation:
    """
    What people do with a trainer before and while it trains. The very same is done to stock's and to ours.

    Attributes:
        of_class (`Callable`, *optional*):
            Makes a subclass of a trainer's class.
        of_host (`Callable`, *optional*):
            Patches TRL's class, as long as the context that it returns: construction and training.
        of_model (`Callable`, *optional*):
            Loads the model from a checkpoint's folder, to be given to the trainer in the place of its name.
        of_trainer (`Callable`, *optional*):
            Changes a trainer that is built: callbacks, hooks, functions of the instance. What it returns, if anything,
            is a context around training.
        train (`Callable`, *optional*):
            Trains in the place of `trainer.train()`.
        forwards (`str`, *optional*):
            Of ours, or the case proves nothing: `"merged"`, fewer with gradient than stock's; `"once"`, these and none
            without gradient.
        rests (`bool`):
            Whether no weight has a reason to move. Where stock's do all the same, by rounding, only ours are looked at.
    """

    of_class: Callable[[type], type] | None = None
    of_host: Callable[[], AbstractContextManager[Any]] | None = None
    of_model: Callable[[Path], Any] | None = None
    of_trainer: Callable[[Trainer], AbstractContextManager[Any] | None] | None = None
    train: Callable[[Trainer], Any] | None = None
    forwards: Literal["merged", "once"] | None = None
    rests: bool = False


@dataclass(frozen=True)
class Case:
    """
    One comparison.

    Attributes:
        name (`str`):
            As given to `--case`.
        covers (`str`):
            What it covers, for the reader of the table.
        config (`Mapping[str, Any]`):
            `GRPOConfig` options. A host that lacks one of them skips the case.
        data (`Batch` or `Rollout`):
            Batches made here, or completions that the host scores.
        model (`str`):
            Tiny model, see [`tiny.model_config`].
        adapter (`str`, *optional*):
            LoRA: `"attention"` on the attention's projections, `"head"` on the output projection too,
            `"head-copy"` on the attention's with a trained copy of the output projection (`modules_to_save`). More of
            them and of PEFT's other methods are in [`adapters`].
        head (`bool`):
            Whether it is about a kind of head, and so belongs to `--models` too.
        frozen_head (`bool`):
            The output projection needs no gradient.
        frozen (`tuple[str, ...]`):
            Ends of the names of further parameters that need no gradient.
        noise (`float`):
            Standard deviation of what is added to the trained weights, so that policy and reference differ.
        mode (`str`):
            `"train"`, `"eval"`, or `"log-probs"` for the pass without gradient alone.
        windows (`int`):
            Gradient accumulation windows played.
        update (`bool`):
            Whether weights move between windows.
        since (`str`):
            First TRL version that supports the case.
        recomputed (`str`):
            Rows recomputed in backward: `"none"` where the forecast must be right, `"some"` where it is wrong on
            purpose, `"any"` where the objective has no forecast.
        wrong_forecast (`bool`):
            Whether the fused trainer gets a wrong forecast.
        fused (`Mapping[str, Any]`):
            `FusedGRPOConfig` options of the fused trainer.
        smooth (`bool`):
            `False` where rounding takes decisions, as in the routing of experts: bfloat16 then says nothing, and skips.
        customised ([`Customisation`], *optional*):
            Compares whole runs of `trainer.train()` with this done to both trainers, see [`training`].
    """

    name: str
    covers: str
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Batch | Rollout = Batch()
    model: str = "llama"
    adapter: str | None = None
    head: bool = False
    frozen_head: bool = False
    frozen: tuple[str, ...] = ()
    noise: float = 0.0
    mode: Literal["train", "eval", "log-probs"] = "train"
    windows: int = 1
    update: bool = False
    since: str = "0.27.2"
    recomputed: Literal["none", "some", "any"] = "none"
    wrong_forecast: bool = False
    fused: Mapping[str, Any] = field(default_factory=dict)
    smooth: bool = True
    customised: Customisation | None = None


FAR = Batch(old="far")
DRIFTED = Batch(old="drifted")
