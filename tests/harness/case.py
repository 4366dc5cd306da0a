"""What a comparison with what a user changes is made of: whole trainings, and single steps drawn at random."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trl_fused_grpo.parity.case import Case, Lengths, Trainer


# A few sequences are much longer than the others, so that two packed micro-batches have fewer tokens than a padded one
# and share a forward by default. The first prompt and the fourth are used
UNEVEN_LENGTHS: Lengths = (7, 4, 5, 2, 3, 6), (13, 2, 3, 1, 4, 2)


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
class DrawnCase(Case):
    """
    Single steps drawn at random, see [`random_cases`]. What stock cannot run, and a layout or backward that the fused
    trainer refuses, is skipped, and ties are told from differences.

    Attributes:
        customised ([`Customisation`]):
            A change that is made to both trainers.
    """

    stock_fails: tuple[str, ...] = ("",)  # part of every message
    customised: Customisation = Customisation()


@dataclass(frozen=True)
class Training(Case):
    """
    Compares whole runs of `trainer.train()`, see [`run_training`].

    Attributes:
        customised ([`Customisation`]):
            A change that is made to both trainers.
        drawn (`bool`):
            Whether the training was drawn at random, see [`random_trainings`].
    """

    customised: Customisation = Customisation()
    drawn: bool = False
