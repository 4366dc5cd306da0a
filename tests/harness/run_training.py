"""
Runs `trainer.train()` of stock and of the fused trainer with the same customisation, and records how the weights moved,
what was logged and what callbacks and hooks saw.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig

from trl_fused_grpo import fuse
from trl_fused_grpo._compat.trainers import trl_class
from trl_fused_grpo.modeling.head import fused_forward
from trl_fused_grpo.parity.case import SkippedError, Trainer
from trl_fused_grpo.parity.run_case import Outcome
from trl_fused_grpo.parity.tiny import batches
from trl_fused_grpo.parity.tiny.batches import ROWS
from trl_fused_grpo.parity.trainers import (
    Settings,
    StockGRPOTrainer,
    fused_trainer,
    load_weights,
    noisy_weights,
    stock_trainer,
)
from trl_fused_grpo.training.checks import Check
from trl_fused_grpo.training.state import FusedState

from .case import Customisation, Training
from .models import MARKER_ID
from .serve import serve_rollouts
from .steps import class_under_test


STEPS = 3
# SGD: Adam makes a full step of an element whose gradient is mere rounding
TRAINING = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": ROWS,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 3,
}
# `fused_max_tokens_per_forward` of the fused trainer's runs: the default, and as many tokens as all micro-batches of an
# accumulation window have, so that they share one forward where nothing forbids it
TOKENS_PER_FORWARD = (None, 10_000)

# Where epochs count instead of steps: a micro-batch has at least half of the completions of the data
STEPS_OF_EPOCHS = 24
_SPARE_GENERATIONS = 4  # for trainings that start a second time
_TIMES = ("runtime", "per_second", "step_time")
_FUSED_ONLY = "fused/"


class EveryStep(int):
    """
    A step number that equals every other. As `_last_loaded_step` it keeps TRL from sending weights to vLLM, which does
    not run here.
    """

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class StockFailedError(Exception):
    """Stock TRL raises, so that nothing can be compared: the message says what it raised."""


@dataclass
class Run:
    """
    What one training did.

    Attributes:
        change (`dict[str, torch.Tensor]`):
            Weights after training minus weights before, of every parameter.
        rounding (`dict[str, float]`):
            Expected Euclidean norm of the error that float32 makes when it rounds a parameter after each step.
        log (`list[dict[str, Any]]`):
            `state.log_history` without times and without what only the fused trainer logs.
        seen (`list`):
            Numbers and words that the customisation recorded in `trainer.seen`.
        forwards (`int`), forwards_without_gradient (`int`):
            Calls of the model.
        recomputed (`float`, *optional*):
            Mean of `fused/rows_recomputed`.
        layout (`str`, *optional*):
            Layout of the fused trainer's rows at the end.
    """

    change: dict[str, torch.Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    forwards: int = 0
    forwards_without_gradient: int = 0
    recomputed: float | None = None
    layout: str | None = None

    @property
    def outcome(self) -> Outcome:
        """Its change of weights and its `train_loss`, for [`errors.measure`]."""
        losses = [entry["train_loss"] for entry in self.log if "train_loss" in entry]
        return Outcome(loss=sum(losses), tensors=self.change)


class Trainings:
    """
    Trains with the stock and with the fused trainer, from the same weights and on the same completions.

    Args:
        case ([`Training`]):
            With a [`Rollout`].
        settings ([`Settings`]):
            Device; the dtype is float32.

    Attributes:
        start (`dict[str, torch.Tensor]`):
            The weights before, by name.
    """

    def __init__(self, case: Training, settings: Settings):
        steps = case.config.get("max_steps", STEPS)
        steps = steps if steps > 0 else STEPS_OF_EPOCHS
        self.case = replace(case, config={**TRAINING, **case.config}, accumulation_windows=steps)
        self.settings = settings
        self.custom = custom = case.customised
        plain = replace(self.case, accumulation_windows=steps + _SPARE_GENERATIONS)
        # A class of the arguments of another trainer of TRL is of no use to `GRPOTrainer`
        own = _class_for(custom, StockGRPOTrainer)  # or a function that makes its objects
        cls = trl_class(own) if isinstance(own, type) else StockGRPOTrainer
        first = stock_trainer(plain, settings, _with_own_model(custom, cls), _config_of(custom))
        self.start = noisy_weights(first, case.noise)
        self._data = batches.make_data(plain, load_weights(first, self.start), case.seed)
        if case.adapter == "alora":
            for generation in self._data:
                generation["prompt_ids"] = [[*ids[:-2], MARKER_ID, ids[-1]] for ids in generation["prompt_ids"]]

    def stock(
        self, start: dict[str, torch.Tensor] | None = None, change: Callable[[Trainer], Any] | None = None
    ) -> Run:
        """Stock's training, from other weights where they are given, or with a trainer that `change` changes."""

        def make(*arguments: Any) -> Trainer:
            trainer = stock_trainer(*arguments, _config_of(self.custom))
            if change is not None:
                change(trainer)
            return trainer

        return self._train(make, StockGRPOTrainer, self.case, self.start if start is None else start)

    def fused(self, tokens: int | None) -> Run:
        """The fused trainer's with these `fused_max_tokens_per_forward`; `None` is its default."""
        options = {} if tokens is None else {"fused_max_tokens_per_forward": tokens}
        case = replace(self.case, fused={**options, **self.case.fused})
        return self._train(_fused_trainer, class_under_test(self.settings), case, self.start)

    def _train(self, make: Callable[..., Trainer], cls: type, case: Training, start: dict[str, torch.Tensor]) -> Run:
        with ExitStack() as stack:
            if self.custom.patch_trl is not None:
                stack.enter_context(self.custom.patch_trl())
            set_seed(0)
            trainer = make(case, self.settings, _with_own_model(self.custom, _class_for(self.custom, cls)))
            return _train(load_weights(trainer, start), start, self._data, self.custom, stack)


@dataclass
class Pair:
    """
    What a case's trainings did.

    Attributes:
        stock ([`Run`]):
            Stock's.
        fused (`dict`):
            The fused trainer's, by their `fused_max_tokens_per_forward`.
        trainings ([`Trainings`]):
            That can run again.
    """

    stock: Run
    fused: dict[int | None, Run]
    trainings: Trainings


def run_both(case: Training, settings: Settings) -> Pair:
    """
    Train with the stock and with the fused trainer, see [`Trainings`].

    Raises:
        [`SkippedError`]:
            When TRL or an optional library lacks what the case needs.
        [`StockFailedError`]:
            When stock's training raises.
    """
    try:
        trainings = Trainings(case, settings)
        stock = trainings.stock()
    except SkippedError:
        raise
    except Exception as error:
        raise StockFailedError(f"stock itself fails: {type(error).__name__}: {error}") from error
    return Pair(stock, {tokens: trainings.fused(tokens) for tokens in TOKENS_PER_FORWARD}, trainings)


def _class_for(custom: Customisation, cls: type) -> Any:
    if custom.make_class is None:
        return cls
    if custom.uses_fuse and cls is not StockGRPOTrainer:
        return fuse(custom.make_class(StockGRPOTrainer))
    return custom.make_class(cls)


def _config_of(custom: Customisation) -> Any:
    return GRPOConfig if custom.load_config is None else custom.load_config()


def _with_own_model(custom: Customisation, cls: Any) -> Callable[..., Trainer]:
    """Makes a trainer with the user's model, and with data to evaluate where its arguments ask for that."""

    def make(model: str, args: Any, **more: Any) -> Trainer:
        own: Any = model
        if custom.load_model is not None:
            own, args.model_init_kwargs = custom.load_model(Path(model)), None
        data = None if args.eval_strategy == "no" else Dataset.from_dict({"prompt": ["w5 w6"] * 2})
        return cls(model=own, args=args, eval_dataset=data, **more)

    return make


def _fused_trainer(case: Training, settings: Settings, cls: Any) -> Trainer:
    return fused_trainer(case, replace(settings, fused_class=cls), _config_of(case.customised))


def _train(
    trainer: Trainer,
    start: dict[str, torch.Tensor],
    data: list[dict[str, Any]],
    custom: Customisation,
    stack: ExitStack,
) -> Run:
    trainer.remove_callback(PrinterCallback)
    trainer._last_loaded_step = EveryStep()
    trainer.seen = []
    serve_rollouts(trainer, data)
    if custom.change_trainer is not None:
        context = custom.change_trainer(trainer)
        if context is not None:
            stack.enter_context(context)
    run = Run(seen=trainer.seen)
    set_seed(1)
    with _counting_forwards(trainer, run):
        if custom.train is None:
            trainer.train()
        else:
            custom.train(trainer)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            run.change[name] = parameter.detach().cpu() - start[name]
            # Each step rounds each of two trainings by an error that is uniform over a unit in the last place: its
            # variance is unit**2 / 12. The unit is 0.5 to 1 times eps of the weight.
            unit = 0.75 * torch.finfo(torch.float32).eps * float(start[name].norm())
            run.rounding[name] = unit * (2 * max(trainer.state.global_step, 1) / 12) ** 0.5
    shares = [entry["fused/rows_recomputed"] for entry in trainer.state.log_history if "fused/rows_recomputed" in entry]
    run.recomputed = sum(shares) / len(shares) if shares else None
    run.log = [_compared(entry) for entry in trainer.state.log_history]
    run.layout = trainer.fused_layout() if shares else None
    return run


def _compared(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES) and _FUSED_ONLY not in name}


@contextmanager
def _counting_forwards(trainer: Trainer, run: Run) -> Generator[None, None, None]:
    """
    Count calls of the model, as nothing that a training looks at: of stock by the look-ups of token embeddings, one a
    call, of the fused trainer where it runs the backbone.
    """
    vocab_size = trainer.model.get_input_embeddings().weight.shape[0]
    owner: Any = torch.nn.functional
    name = "embedding"
    if hasattr(trainer, "fused_stats"):
        owner, name = fused_forward, "run_backbone"
    original = getattr(owner, name)

    def counted(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        if owner is fused_forward or second.shape[0] == vocab_size:
            run.forwards += torch.is_grad_enabled()
            run.forwards_without_gradient += not torch.is_grad_enabled()
        return original(first, second, *args, **kwargs)

    compared, generated = Check._logps_error, FusedState.generate

    def uncounted(call: Callable, *args: Any) -> Any:
        before = run.forwards_without_gradient
        result = call(*args)
        run.forwards_without_gradient = before
        return result

    def generate(state: FusedState, *args: Any) -> Any:
        is_first = state._has_summary_to_tell  # whose log-probs are computed in any case
        return uncounted(generated, state, *args) if is_first else generated(state, *args)

    with (
        mock.patch.object(owner, name, counted),
        mock.patch.object(Check, "_logps_error", lambda *args: uncounted(compared, *args)),
        mock.patch.object(FusedState, "generate", generate),
    ):
        yield
