"""
Trainings that somebody has customised on one process alone, each in processes of its own: see [`forked`].

Each run leaves what each rank saw, `<run>.<rank>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest
from trl_fused_grpo.parity.tiny import tokenizer

from .engines import launcher_options, plain_sgd, whole_parameters
from .forked import QUICK
from .rollouts import drawn


ACCUMULATION, RANKS = 2, 2


class Watching(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None: ...


def _layer(trainer: Any) -> nn.Module:
    return trainer.model.model.layers[0]


def _hook_gradients(trainer: Any) -> None:
    """As `wandb.watch` does, which Transformers' callback calls on the main process alone."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: None)


def _replace_method(trainer: Any) -> None:
    own = trainer._prepare_inputs
    trainer._prepare_inputs = lambda batch: own(batch)


def _replace_generation(trainer: Any) -> None:
    own = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda batch: own(batch)


def _replace_log_probs(trainer: Any) -> None:
    own = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: own(*args, **kwargs)


def _own_class(trainer: Any) -> None:
    mlp = _layer(trainer).mlp
    known: Any = type(mlp)

    class MLP(known):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    mlp.__class__ = MLP


def _hook_later(trainer: Any) -> None:
    """Between two optimizer steps of one generation batch."""

    class Later(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                _hook_gradients(trainer)

    trainer.add_callback(Later())


def _hook_wrapper(trainer: Any) -> None:
    """On what Accelerate makes of the model, DDP's module for example."""

    class Wrapped(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.model_wrapped.register_forward_hook(lambda module, args, output: None)

    trainer.add_callback(Wrapped())


def _write_weights(trainer: Any) -> None:
    """In the reward function, what is there already: equal weights are to be compared with stock's."""
    [reward] = trainer.reward_funcs

    def writes(**kwargs: Any) -> list[float]:
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.mul_(1.0)
        return reward(**kwargs)

    trainer.reward_funcs = [writes]


CUSTOMISATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda trainer: None,
    "gradients": _hook_gradients,
    "gradients-later": _hook_later,
    "module": lambda trainer: _layer(trainer).register_forward_hook(lambda module, args, output: None),
    "wrapper": _hook_wrapper,
    "head": lambda trainer: trainer.model.lm_head.register_forward_hook(lambda module, args, output: None),
    "reference": lambda trainer: trainer.ref_model.register_forward_hook(lambda module, args, output: None),
    "callback": lambda trainer: trainer.add_callback(Watching()),
    "method": _replace_method,
    "generation": _replace_generation,
    "log-probs": _replace_log_probs,
    "own-class": _own_class,
    "weights": _write_weights,
}


@dataclass(frozen=True)
class Run:
    """
    One training.

    Attributes:
        backend (`str`): `"ddp"`, `"fsdp2"` or `"zero3"`.
        case (`str`): a name in [`CUSTOMISATIONS`], of what rank 0 has; behind `"@1"`, rank 1.
        trainer (`str`): `"stock"` or `"fused"`.
        beta (`float`): of the KL term.
    """

    backend: str
    case: str
    trainer: str = "fused"
    beta: float = 0.0

    processes = RANKS

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.case}-{self.beta}-{self.trainer}"

    @property
    def customisation(self) -> str:
        return self.case.removesuffix("@1")

    @property
    def customised_rank(self) -> int:
        return int(self.case.endswith("@1"))

    @property
    def windows(self) -> int:
        """Optimizer steps; with KL fewer, since it grows by itself, and rounding with it."""
        return 2 if self.beta else 4

    @property
    def verifies(self) -> bool:
        return self.beta == 0.0 and self.backend == "ddp"


_ANY = (*CUSTOMISATIONS, "gradients@1", "module@1")
_EVERY = tuple(case for case in _ANY if case != "reference")
_WITH_REFERENCE = tuple(case for case in _ANY if case != "weights")  # these have one generation alone
_FEW = ("nothing", "gradients", "module", "callback", "own-class")
_QUICK = ("nothing", "gradients", "module", "log-probs", "weights")


def _runs(backend: str, beta: float, cases: tuple[str, ...] = _EVERY) -> list[Run]:
    return [Run(backend, "nothing", "stock", beta), *(Run(backend, case, "fused", beta) for case in cases)]


LAUNCHES = {
    QUICK: _runs("ddp", 0.0, _QUICK),
    "ddp": _runs("ddp", 0.0, tuple(case for case in _EVERY if case not in _QUICK)),
    "ddp-beta": _runs("ddp", 0.05, _WITH_REFERENCE),
    **{f"{backend}-beta": _runs(backend, 0.05, (*_FEW, "reference")) for backend in ("fsdp2", "zero3")},
    **{backend: _runs(backend, 0.0) for backend in ("fsdp2", "zero3")},
}


def build(run: Run, folder: Path) -> Any:
    """A trainer with plain SGD in steps that are long beside the rounding of weights, two to a generation batch."""
    is_fused = run.trainer == "fused"
    own = {"fused_max_tokens_per_forward": 1000, "fused_verify": int(run.verifies)}
    args = (FusedGRPOConfig if is_fused else GRPOConfig)(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=ACCUMULATION,
        steps_per_generation=2 * ACCUMULATION,
        num_generations=3,
        max_completion_length=8,
        max_steps=run.windows,
        learning_rate=0.2 if run.beta else 0.5,
        beta=run.beta,
        bf16=False,
        gradient_checkpointing=False,
        **plain_sgd(),
        **launcher_options(run.backend),
        **(own if is_fused else {}),
    )
    torch.manual_seed(0)
    return (FusedGRPOTrainer if is_fused else GRPOTrainer)(
        model=str(folder / "llama"),
        reward_funcs=lambda completion_ids, **_: [float(len(ids) + sum(ids) % 7) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 7}" + " w5" * (i % 4) for i in range(5, 37)]}),
        processing_class=tokenizer(),
    )


def work(run: Run, folder: Path, rank: int) -> None:
    """Train one run."""
    trainer = build(run, folder)
    start = whole_parameters(trainer)
    if rank == run.customised_rank:
        CUSTOMISATIONS[run.customisation](trainer)
    forwards: list[bool] = []
    call = FusedRequest.__call__

    def counted(self: FusedRequest, *args: Any, **kwargs: Any) -> Any:
        forwards.append(torch.is_grad_enabled())
        return call(self, *args, **kwargs)

    with drawn(trainer.processing_class, reads_model=False), mock.patch.object(FusedRequest, "__call__", counted):
        trainer.train()
    moved = {name: value - start[name] for name, value in whole_parameters(trainer).items()}
    seen = {
        "world": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "logs": [entry for entry in trainer.state.log_history if "grad_norm" in entry],
        "forwards": forwards,
        "layout": trainer.fused_layout() if run.trainer == "fused" else "",
        "moves": run.trainer == "fused"
        and any("has changed the model" in r.text for r in trainer._fused.ladder.findings.reasons),
    }
    (folder / f"{run.name}.{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        save_file(moved, folder / f"{run.name}.safetensors")
