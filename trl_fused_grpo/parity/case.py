"""A comparison: a configuration, and the data that goes in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


Trainer: TypeAlias = Any  # a GRPOTrainer; its attributes depend on the version of TRL

# Of prompts and of completions, for the rows of a micro-batch in turn
Lengths: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
LENGTHS: Lengths = (7, 4, 5, 7, 3, 6), (13, 9, 4, 1, 11, 7)


class SkippedError(Exception):
    """The case does not apply here: the message says why."""


@dataclass(frozen=True)
class Batch:
    """
    Micro-batches that the trainer gets as they are: its own generation is left out.

    Attributes:
        old (`str`, *optional*): old log-probs: `"policy"` gives the current ones, `"far"` moves part of the ratios
            beyond each clip bound, `"drifted"` moves whole rows beyond one bound or the other.
        ratio (`str`, *optional*): vLLM importance ratios: `"report"` gives one a sequence, of mean 0.005, as
            Liger-Kernel's bug report 1082 does.
        reference (`bool`): whether reference log-probs are given.
        sampling (`bool`): whether the sampler's log-probs are given.
        tool_mask (`bool`): whether some completion tokens were written by a tool.
        token_advantages (`bool`): whether advantages have shape `[B, T]` instead of `[B]`.
        empty_rows (`tuple[int, ...]`): rows without a single completion token.
        empty_micro_batches (`tuple[int, ...]`): micro-batches in which every completion token is masked.
        images (`str`, *optional*): format of the images in the prompts, a name in [`tiny.images.FORMATS`].
        repeated_prompts (`bool`): whether the rows of the first group have the same prompt, with the same images.
        lengths (`tuple`): of the prompts and completions of a micro-batch.
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
    repeated_prompts: bool = False
    lengths: Lengths = LENGTHS


@dataclass(frozen=True)
class Rollout:
    """
    Completions for which TRL itself computes rewards, advantages, masks, old and reference log-probs and vLLM ratios.

    Attributes:
        sampling (`str`, *optional*): sampler's log-probs: `"token"` spreads the per-token ratios over both clip bounds,
            `"sequence"` the per-sequence ones. `None`: the sampler gives none, as when transformers generates.
        nan (`bool`): whether the sampler gives no log-prob (NaN) for some tokens.
        env_mask (`bool`): whether some completion tokens were written by an environment.
        truncated_rows (`tuple[int, ...]`): rows that stop without an end-of-sequence token.
        equal_completions (`bool`): whether all completions to the first prompt are the same, so that their advantages
            are zero.
        lengths (`tuple`): of the prompts and completions of a micro-batch.
    """

    sampling: Literal["token", "sequence"] | None = None
    nan: bool = False
    env_mask: bool = False
    truncated_rows: tuple[int, ...] = ()
    equal_completions: bool = False
    lengths: Lengths = LENGTHS


@dataclass(frozen=True)
class Case:
    """
    One comparison.

    Attributes:
        name (`str`): as given to `--case`.
        description (`str`): what it compares, for the reader of `--list`.
        config (`Mapping[str, Any]`): `GRPOConfig` options. A TRL that lacks one of them skips the case.
        data (`Batch` or `Rollout`): finished micro-batches, or completions from which TRL makes them.
        model (`str`): tiny model, see [`tiny.model_config`].
        adapter (`str`, *optional*): PEFT adapter, a name in [`tiny.models.ADAPTERS`].
        head (`bool`): whether the case is about a kind of output projection, and so belongs to `--models` too.
        frozen_head (`bool`): whether the output projection needs no gradient.
        frozen (`tuple[str, ...]`): ends of the names of further parameters that need no gradient.
        noise (`float`): standard deviation of what is added to the trained weights: policy and reference differ.
        mode (`str`): `"train"`, `"eval"`, or `"log-probs"` for the log-prob method without gradient alone.
        accumulation_windows (`int`): how many run. Each has the micro-batches of one optimizer step.
        update (`bool`): whether weights move between accumulation windows.
        min_trl (`str`, *optional*): first TRL version that supports the case.
        recomputed (`str`): rows recomputed in backward: `"none"` where the forecast must be right, `"some"` where it is
            wrong on purpose, `"any"` where the objective has no forecast.
        wrong_forecast (`bool`): whether the fused trainer gets a wrong forecast.
        fused (`Mapping[str, Any]`): `FusedGRPOConfig` options of the fused trainer.
        stock_fails (`tuple[str, ...]`): parts of the messages with which stock itself fails on some versions. There the
            case is skipped.
        compare_bf16 (`bool`): whether bfloat16 is compared. `False` where rounding decides the routing of experts.
        compare_liger (`bool`): whether TRL's Liger loss is compared, where there is one.
        seed (`int`): of the tokens and of everything else that data is drawn from.
    """

    name: str
    description: str
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Batch | Rollout = Batch()
    model: str = "llama"
    adapter: str | None = None
    head: bool = False
    frozen_head: bool = False
    frozen: tuple[str, ...] = ()
    noise: float = 0.0
    mode: Literal["train", "eval", "log-probs"] = "train"
    accumulation_windows: int = 1
    update: bool = False
    min_trl: str | None = None
    recomputed: Literal["none", "some", "any"] = "none"
    wrong_forecast: bool = False
    fused: Mapping[str, Any] = field(default_factory=dict)
    stock_fails: tuple[str, ...] = ()
    compare_bf16: bool = True
    compare_liger: bool = True
    seed: int = 0
