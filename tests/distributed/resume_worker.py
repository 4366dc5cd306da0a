"""
Trainings that are killed and resumed, each in processes of its own: see [`forked`].

Each run leaves its checkpoints in `<run>/`, its logs, `<run>.json`, and its parameters, `<run>.safetensors`. A killed
one leaves what it was in the middle of, in the place of the logs.
"""

import json
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

from tests.compiler import traced_layers
from tests.training.sampler import expect_sampler, train_on
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import FIRST_WORD_ID, VOCAB_SIZE, tokenizer

from .adapters import adapter
from .engines import launcher_options, whole_parameters
from .forked import QUICK
from .worker import fed_as_stock


ACCUMULATION = 2
ROWS = 2  # completions to a micro-batch of one rank
STEPS = 6
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """
    What is trained, and when it is killed.

    Attributes:
        options (`dict`): of the arguments of both trainers.
        fused (`dict`): of the fused trainer's.
        checkpoint (`int`): the optimizer step after which the resumed training goes on.
        killed (`tuple[int, int]`):
            The optimizer steps that are done when the process is killed, and the micro-batches of the window.
        samples (`bool`): whether completions come from a stand-in for vLLM, with log-probs of its own.
        adapts (`bool`): whether LoRA is trained.
    """

    options: dict[str, Any]
    fused: dict[str, Any]
    checkpoint: int
    killed: tuple[int, int]
    samples: bool = False
    adapts: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint stands between two generation batches."""
        in_use = self.options.get("steps_per_generation", ACCUMULATION) * self.options.get("num_iterations", 1)
        return self.checkpoint * ACCUMULATION % in_use == 0

    @property
    def loss_waits(self) -> bool:
        """Whether it is killed where a loss waits for another micro-batch of its window and of its generation batch."""
        steps, micro_batches = self.killed
        of_generation = self.options.get("steps_per_generation", ACCUMULATION)
        is_last = (steps * ACCUMULATION + micro_batches) % of_generation == 0
        return micro_batches < ACCUMULATION and not is_last


SHARED = {"fused_max_tokens_per_forward": 1000}
CASES = {
    # the first micro-batch has run the forward of both, and its loss waits for the backward
    "window": Case({}, {**SHARED, "fused_verify": 2}, checkpoint=2, killed=(3, 1)),
    # vLLM's ratio comes from the training forward
    "generation": Case({"steps_per_generation": 4}, SHARED, checkpoint=2, killed=(3, 1), samples=True),
    # an accumulation window has micro-batches of two generation batches
    "straddling": Case({"steps_per_generation": 3}, SHARED, checkpoint=3, killed=(4, 1), samples=True),
    "on-policy": Case({}, SHARED, checkpoint=3, killed=(3, 1), samples=True),
    "iterations": Case({"num_iterations": 2, "beta": 0.1}, SHARED, checkpoint=2, killed=(3, 2), adapts=True),
    "compiled": Case({}, {"fused_compile": True}, checkpoint=2, killed=(2, 1), adapts=True, samples=True),
    # the checkpoint is in the middle of a generation batch: TRL generates anew
    "middle": Case({"steps_per_generation": 4}, SHARED, checkpoint=3, killed=(3, 1)),
    "middle-iterations": Case({"num_iterations": 2}, SHARED, checkpoint=3, killed=(3, 1)),
}


@dataclass(frozen=True)
class Run:
    """
    One training.

    Attributes:
        backend (`str`): `"one"` or `"alone"` for one process, or see [`runs.Run`].
        case (`str`): a name in `CASES`.
        trainer (`str`): `"stock"` or `"fused"`.
        mode (`str`): `"whole"`, `"killed"`, or `"resumed"`: from what the killed one left, in stock the whole one.
    """

    backend: str
    case: str
    trainer: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.case}-{self.trainer}-{self.mode}"

    @property
    def processes(self) -> int:
        return 1 if self.backend in ("one", "alone") else 2


def _runs(backend: str, *cases: str) -> list[Run]:
    stock = [Run(backend, case, "stock", mode) for case in cases for mode in ("whole", "resumed")]
    return stock + [Run(backend, case, "fused", mode) for case in cases for mode in ("whole", "killed", "resumed")]


_MOST = ("window", "generation", "iterations", "compiled", "middle")
LAUNCHES = {
    QUICK: [Run("alone", "window", "fused", mode) for mode in ("whole", "killed", "resumed")],
    "one": _runs("one", *CASES),
    "ddp": _runs("ddp", *CASES),
    "fsdp2": _runs("fsdp2", *_MOST),
    "zero3": _runs("zero3", *_MOST),
    "zero2": _runs("zero2", "window", "generation"),  # no FSDP1: on the CPU torch crashes when it saves a checkpoint
}


class Killed(GRPOTrainer):
    """Kills its process, or nothing, after a micro-batch; it reads none, and does not count ([`fed_as_stock`])."""

    killed: tuple[int, int] | None = None
    done = 0
    left_behind: Path  # a file for what is known when it is killed

    def floating_point_ops(self, inputs: Any) -> int:
        self.done = self.done % ACCUMULATION + 1
        if self.killed == (self.state.global_step, self.done):
            self.left_behind.write_text(json.dumps({"waits": self._fused.forwards.is_waiting}))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().floating_point_ops(inputs)


class KilledFused(Killed, FusedGRPOTrainer):
    pass


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 10 + sum(ids) % 97 / 970 for ids in completion_ids]


def _sample(prompts: list) -> tuple[list, list, list]:
    """Completions of many lengths, with log-probs of a sampler, from the process's own random numbers."""
    lengths = torch.randint(1, 9, (len(prompts),)).tolist()
    completions = [torch.randint(FIRST_WORD_ID, VOCAB_SIZE, (n,)).tolist() for n in lengths]
    logps = [(-6.9 + 0.3 * torch.randn(n)).tolist() for n in lengths]
    return [[5, 6, 7, 8][: 1 + i // ROWS % 4] for i in range(len(prompts))], completions, logps


def _use_sampler(trainer: Any) -> None:
    expect_sampler(trainer)
    train_on(trainer, _sample)


def _build(run: Run, folder: Path) -> Any:
    case = CASES[run.case]
    is_fused = run.trainer == "fused"
    options = {"use_cpu": True} if run.processes == 1 else launcher_options(run.backend)
    options = {**options, **case.options, **(case.fused if is_fused else {})}
    args = (FusedGRPOConfig if is_fused else GRPOConfig)(
        output_dir=str(folder / run.name),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=ROWS,
        max_steps=STEPS,
        max_completion_length=8,
        bf16=False,
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        save_steps=case.checkpoint if run.mode == "killed" else 1,
        seed=3,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "device_map": None},
        **options,
    )
    trainer = (KilledFused if is_fused else Killed)(
        model=str(folder / "llama"),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9", "w10", "w11 w12 w13 w14"] * 8}),
        processing_class=tokenizer(),
        peft_config=adapter("lora") if case.adapts else None,
    )
    if case.samples:
        _use_sampler(trainer)
    return trainer


def work(run: Run, folder: Path, rank: int) -> None:
    """Train one run."""
    torch.manual_seed(0)
    case = CASES[run.case]
    checkpoint = None
    if run.mode == "resumed":
        before = replace(run, mode="killed" if run.trainer == "fused" else "whole")
        checkpoint = str(folder / before.name / f"checkpoint-{case.checkpoint}")
    with ExitStack() as stack:
        stack.enter_context(fed_as_stock())
        if "fused_compile" in case.fused:
            stack.enter_context(traced_layers())
        trainer = _build(run, folder)
        # The last rank is killed
        trainer.killed = case.killed if run.mode == "killed" and rank == run.processes - 1 else None
        trainer.left_behind = folder / f"{run.name}.json"
        trainer.train(resume_from_checkpoint=checkpoint)
    parameters = whole_parameters(trainer)
    if rank == 0:
        save_file({name: value.contiguous() for name, value in parameters.items()}, folder / f"{run.name}.safetensors")
        (folder / f"{run.name}.json").write_text(json.dumps(trainer.state.log_history))
