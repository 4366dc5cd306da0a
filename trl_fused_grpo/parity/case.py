"""What a comparison is made of: a configuration, the data that goes in, and what a user changes about the trainer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias


Trainer: TypeAlias = Any  # a GRPOTrainer; its attributes depend on the version of TRL


class SkippedError(Exception):
    """The case does not apply here: the message says why."""


@dataclass(frozen=True)
class Batch:
    """
    Micro-batches that the trainer gets as they are: its own generation is left out.

    Attributes:
        old (`str`, *optional*):
            Old log-probs: `None` leaves them out, `"policy"` gives the current ones, `"far"` moves them so that part of
            the ratios lies beyond each clip bound, `"drifted"` moves whole rows beyond one bound or the other.
        ratio (`str`, *optional*):
            vLLM importance ratios: `"report"` gives one value a sequence, of mean 0.005, as Liger-Kernel's bug report
            1082 does.
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
            Micro-batches in which every completion token is masked.
        images (`str`, *optional*):
            Format of the images in the prompts, a name in [`tiny.images.FORMATS`].
        repeated_prompts (`bool`):
            Whether the rows of the first group have the same prompt, with the same images.
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


@dataclass(frozen=True)
class Rollout:
    """
    Completions for which TRL itself computes rewards, advantages, masks, old and reference log-probs and vLLM ratios.

    Attributes:
        sampling (`str`, *optional*):
            Sampler's log-probs: `"token"` spreads the per-token ratios over both clip bounds, `"sequence"` the
            per-sequence ones. `None`: the sampler gives none, as when transformers generates.
        nan (`bool`):
            Whether the sampler gives no log-prob (NaN) for some tokens.
        env_mask (`bool`):
            Whether some completion tokens were written by an environment.
        truncated_rows (`tuple[int, ...]`):
            Rows that stop without an end-of-sequence token.
        uneven (`bool`):
            Whether a few sequences are much longer than the others, so that two packed micro-batches have fewer tokens
            than a padded one and share a forward by default.
        has_marker (`bool`):
            Whether the token before the last of every prompt is [`tiny.families.MARKER_ID`].
        equal_completions (`bool`):
            Whether all completions to the first prompt are the same, so that their advantages are zero.
    """

    sampling: Literal["token", "sequence"] | None = None
    nan: bool = False
    env_mask: bool = False
    truncated_rows: tuple[int, ...] = ()
    uneven: bool = False
    has_marker: bool = False
    equal_completions: bool = False


@dataclass(frozen=True)
class Shape:
    """
    How many sequences a case has, and of which lengths.

    Attributes:
        rows (`int`):
            Completions in a micro-batch.
        group (`int`):
            Completions to a prompt.
        lengths (`int`, *optional*):
            Seed from which the lengths of prompts and completions are drawn. `None` takes those of the named cases.
    """

    rows: int = 6
    group: int = 3
    lengths: int | None = None


@dataclass(frozen=True)
class Customisation:
    """
    What a user changes about a trainer, before or while it trains. Stock's and the fused trainer get the same change.

    Attributes:
        make_class (`Callable`, *optional*):
            Makes a subclass of a trainer's class.
        uses_fuse (`bool`):
            Whether `make_class` gets stock's class for the fused trainer too, and `fuse` makes the fused one of it.
        load_config (`Callable`, *optional*):
            Returns the class of the arguments, in place of `GRPOConfig`.
        patch_trl (`Callable`, *optional*):
            Returns a context that patches TRL's class or module. Construction and training run inside it.
        load_model (`Callable`, *optional*):
            Loads the model from a checkpoint's folder. The trainer then gets the model instead of its name.
        change_trainer (`Callable`, *optional*):
            Changes a trainer that is built: callbacks, hooks, methods of the instance. It may return a context, inside
            which training runs.
        train (`Callable`, *optional*):
            Runs in place of `trainer.train()`.
        forwards (`str`, *optional*):
            What the fused trainer must save, or the case proves nothing: `"merged"` asks for fewer forwards with
            gradient than stock's, `"grad-only"` for that and for no forward without gradient.
        has_no_update (`bool`):
            Whether the loss gives no weight a reason to move. Where stock's weights move all the same, by rounding, the
            case is skipped as long as the fused trainer's do not.
    """

    make_class: Callable[[type], type] | None = None
    uses_fuse: bool = False
    load_config: Callable[[], type] | None = None
    patch_trl: Callable[[], AbstractContextManager[Any]] | None = None
    load_model: Callable[[Path], Any] | None = None
    change_trainer: Callable[[Trainer], AbstractContextManager[Any] | None] | None = None
    train: Callable[[Trainer], Any] | None = None
    forwards: Literal["merged", "grad-only"] | None = None
    has_no_update: bool = False


@dataclass(frozen=True)
class Case:
    """
    One comparison.

    Attributes:
        name (`str`):
            As given to `--case`.
        description (`str`):
            What it compares, for the reader of `--list`.
        config (`Mapping[str, Any]`):
            `GRPOConfig` options. A TRL that lacks one of them skips the case.
        data (`Batch` or `Rollout`):
            Finished micro-batches, or completions from which TRL makes them.
        model (`str`):
            Tiny model, see [`tiny.model_config`].
        adapter (`str`, *optional*):
            PEFT adapter by its name in [`tiny.adapters`], for example `"attention"`: LoRA on the attention projections.
        head (`bool`):
            Whether the case is about a kind of output projection, and so belongs to `--models` too.
        frozen_head (`bool`):
            Whether the output projection needs no gradient.
        frozen (`tuple[str, ...]`):
            Ends of the names of further parameters that need no gradient.
        noise (`float`):
            Standard deviation of what is added to the trained weights, so that policy and reference differ.
        mode (`str`):
            `"train"`, `"eval"`, or `"log-probs"` for the log-prob method without gradient alone.
        accumulation_windows (`int`):
            How many accumulation windows run. Each has the micro-batches of one optimizer step.
        update (`bool`):
            Whether weights move between accumulation windows.
        min_trl (`str`, *optional*):
            First TRL version that supports the case; `None`: all that this package supports.
        recomputed (`str`):
            Rows recomputed in backward: `"none"` where the forecast must be right, `"some"` where it is wrong on
            purpose, `"any"` where the objective has no forecast.
        wrong_forecast (`bool`):
            Whether the fused trainer gets a wrong forecast.
        fused (`Mapping[str, Any]`):
            `FusedGRPOConfig` options of the fused trainer.
        layout (`str`, *optional*):
            How the fused trainer lays out the rows, where a test holds it: `"packed"` or `"padded"`.
        stock_fails (`tuple[str, ...]`):
            Parts of the messages with which stock itself fails on some versions. The case is skipped there, and only
            where stock fails so.
        compare_bf16 (`bool`):
            Whether bfloat16 is compared. `False` where rounding changes discrete choices, such as an expert's routing.
        compare_liger (`bool`):
            Whether TRL's Liger loss is compared, where there is one.
        customised ([`Customisation`], *optional*):
            Compares whole runs of `trainer.train()` with this change made to both trainers, see [`run_training`].
        stepwise ([`Customisation`], *optional*):
            A change that is made to both trainers of a case that is not about whole trainings.
        shape ([`Shape`]):
            How many sequences, and how long they are.
        seed (`int`):
            Of the tokens and of everything else that data is drawn from.
        drawn (`bool`):
            Whether the case was drawn at random, see [`random_cases`]. What stock cannot run, and a layout or backward
            that the fused trainer refuses, is then skipped, and ties are told from differences.
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
    layout: str | None = None
    stock_fails: tuple[str, ...] = ()
    compare_bf16: bool = True
    compare_liger: bool = True
    customised: Customisation | None = None
    stepwise: Customisation | None = None
    shape: Shape = Shape()
    seed: int = 0
    drawn: bool = False

    def trainer_class(self, cls: Any) -> Callable[..., Trainer]:
        """The trainer's class with what the user changes in it, see `stepwise`."""
        make = None if self.stepwise is None else self.stepwise.make_class
        return cls if make is None else make(cls)

    @contextmanager
    def changed(self, trainer: Trainer) -> Generator[None, None, None]:
        """While it lasts, a trainer that is built has what the user changes in it, see `stepwise`."""
        change = None if self.stepwise is None else self.stepwise.change_trainer
        trainer.seen.clear()
        context = None if change is None else change(trainer)
        with nullcontext() if context is None else context:
            yield

    def config_class(self, default: type) -> Any:
        """The class of the trainers' arguments: the one that the customisation loads, or `default`."""
        load = None if self.customised is None else self.customised.load_config
        return default if load is None else load()


FAR = Batch(old="far")
DRIFTED = Batch(old="drifted")
