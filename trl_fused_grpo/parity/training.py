"""Whole runs of `trainer.train()`, stock and ours with the same customisation: weights, logs, what callbacks saw."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from transformers import PrinterCallback, set_seed

from . import batches
from .case import Case, Customisation, Trainer
from .play import Outcome
from .trainers import ROWS, Settings, StockGRPOTrainer, fused, load, stock


STEPS = 3
# SGD: Adam makes whole steps of elements whose gradient is rounding
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
# Ours once as it comes, and once with every micro-batch of a window in one forward where nothing forbids it
PASS_TOKENS = (None, 10_000)

_SPARE_GENERATIONS = 4  # for trainings that are begun again
_TIMES = ("runtime", "per_second", "step_time")
_OURS_ALONE = "fused/"


class EveryStep(int):
    """A step that is always the one at which weights were last given to vLLM, which does not run here."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class StockFailedError(Exception):
    """Nothing can be compared: the message says what stock TRL raised."""


@dataclass
class Run:
    """
    What a training left.

    Attributes:
        change (`dict[str, torch.Tensor]`):
            By how much every parameter moved.
        rounding (`dict[str, float]`):
            What float32 makes of every parameter's weights as it rounds them after each step: a Euclidean norm.
        log (`list[dict[str, Any]]`):
            `state.log_history` without times and without what only the fused trainer logs.
        seen (`list`):
            Numbers and words that the customisation wrote down in `trainer.seen`.
        forwards (`int`), forwards_without_gradient (`int`):
            Calls of the model.
        recomputed (`float`, *optional*):
            Mean of `fused/rows_recomputed`.
        layout (`str`, *optional*):
            How the fused trainer laid rows out in the end.
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
        """Its change of weights and its `train_loss`, to be measured."""
        losses = [entry["train_loss"] for entry in self.log if "train_loss" in entry]
        return Outcome(loss=sum(losses), tensors=self.change)


@dataclass
class Pair:
    """A run of stock's, and ours of the same: by `fused_max_tokens_per_forward`."""

    stock: Run
    ours: dict[int | None, Run]


def run_both(case: Case, settings: Settings) -> Pair:
    """
    Train with stock's trainer and with ours, from the same weights and on the same completions.

    Args:
        case ([`Case`]):
            With a [`Customisation`] and a [`Rollout`].
        settings ([`Settings`]):
            Device; the dtype is float32.

    Raises:
        [`SkippedError`]:
            When the host or an extra lacks what the case needs.
        [`StockFailedError`]:
            When stock's training raises.
    """
    case = replace(case, config={**TRAINING, **case.config}, windows=case.config.get("max_steps", STEPS))
    done = case.customised
    assert done is not None
    plain = replace(case, customised=Customisation(of_model=done.of_model), windows=case.windows + _SPARE_GENERATIONS)
    first = stock(plain, settings)
    start = _start(first, case)
    data = batches.rollout(plain, load(first, start), seed=0)

    def train(make: Any, cls: type, case: Case, settings: Settings) -> Run:
        with ExitStack() as stack:
            if done.of_host is not None:
                stack.enter_context(done.of_host())
            set_seed(0)
            trainer = make(case, settings, done.of_class(cls) if done.of_class is not None else cls)
            return _train(load(trainer, start), start, data, done, stack)

    try:
        theirs = train(stock, StockGRPOTrainer, case, settings)
    except Exception as error:
        raise StockFailedError(f"stock itself fails: {type(error).__name__}: {error}") from error
    ours = {}
    for tokens in PASS_TOKENS:
        options = {} if tokens is None else {"fused_max_tokens_per_forward": tokens}
        ours[tokens] = train(
            _fused, _class_under_test(settings), replace(case, fused={**options, **case.fused}), settings
        )
    return Pair(theirs, ours)


def _class_under_test(settings: Settings) -> Any:
    from trl_fused_grpo import FusedGRPOTrainer

    return settings.ours or FusedGRPOTrainer


def _fused(case: Case, settings: Settings, cls: Any) -> Trainer:
    return fused(case, replace(settings, ours=cls))


def _start(trainer: Trainer, case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {}
    for name, parameter in trainer.model.named_parameters():
        value = parameter.detach().cpu().clone()
        if case.noise and parameter.requires_grad:
            value += case.noise * torch.randn(value.shape, generator=generator)
        values[name] = value
    return values


def _train(
    trainer: Trainer, start: dict[str, torch.Tensor], data: list[dict[str, Any]], done: Customisation, stack: ExitStack
) -> Run:
    trainer.remove_callback(PrinterCallback)
    trainer._last_loaded_step = EveryStep()
    trainer.seen = []
    _serve(trainer, data)
    if done.of_trainer is not None:
        context = done.of_trainer(trainer)
        if context is not None:
            stack.enter_context(context)
    run = Run(seen=trainer.seen)
    set_seed(1)
    with _counting_forwards(trainer, run):
        if done.train is None:
            trainer.train()
        else:
            done.train(trainer)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            run.change[name] = parameter.detach().cpu() - start[name]
            # Uniform over a unit in the last place, 0.5 to 1 times eps of the weight; two trainings differ by two such
            unit = 0.75 * torch.finfo(torch.float32).eps * float(start[name].norm())
            run.rounding[name] = unit * (2 * max(trainer.state.global_step, 1) / 12) ** 0.5
    shares = [entry["fused/rows_recomputed"] for entry in trainer.state.log_history if "fused/rows_recomputed" in entry]
    run.recomputed = sum(shares) / len(shares) if shares else None
    run.log = [_compared(entry) for entry in trainer.state.log_history]
    run.layout = trainer.fused_layout() if shares else None  # only a fused trainer logs shares
    return run


def _compared(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES) and _OURS_ALONE not in name}


def _serve(trainer: Trainer, generations: list[dict[str, Any]]) -> None:
    """Have generation answer with `generations` in turn, and in evaluation with the beginning of the first."""
    remaining = iter(generations)

    def answer(count: int) -> dict[str, Any]:
        if trainer.model.training:
            return dict(next(remaining))
        return {name: value and value[:count] for name, value in generations[0].items()}

    def roll_out(prompts: list[Any], trainer: Trainer) -> dict[str, Any]:
        return answer(len(prompts))

    def single_turn(prompts: list[Any]) -> tuple[list, list, list | None, dict]:
        given = answer(len(prompts))
        return given["prompt_ids"], given["completion_ids"], given["logprobs"], {}

    trainer.rollout_func = roll_out
    trainer._generate_single_turn = single_turn  # TRL 0.27 consults rollout_func only when vLLM runs


@contextmanager
def _counting_forwards(trainer: Trainer, run: Run) -> Generator[None, None, None]:
    """Count calls of the model where no hook of ours is seen: each looks its tokens up once."""
    embed = torch.nn.functional.embedding
    vocab_size = trainer.model.get_input_embeddings().weight.shape[0]

    def counted(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if weight.shape[0] == vocab_size and torch.is_grad_enabled():
            run.forwards += 1
        elif weight.shape[0] == vocab_size:
            run.forwards_without_gradient += 1
        return embed(ids, weight, *args, **kwargs)

    with mock.patch.object(torch.nn.functional, "embedding", counted):
        yield
