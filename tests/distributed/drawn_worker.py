"""
Trainings of two processes drawn at random, each in processes of its own: see [`forked`]. What one process generates has
other lengths than what the other does, so that each pads to a width of its own.

Each run leaves what each rank saw, `<run>.<rank>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

from tests.harness.drawing import Draw
from tests.training.sampler import expect_sampler
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import FIRST_WORD_ID, VOCAB_SIZE, tokenizer

from .adapters import adapter
from .engines import launcher_options, plain_sgd, whole_parameters
from .runs import RANKS


SEED = int(os.environ.get("DRAWN_SEED", "1"))  # another one draws other trainings


@dataclass(frozen=True)
class Run:
    """
    One training.

    Attributes:
        backend (`str`): `"ddp"`, `"fsdp2"`, `"zero2"` or `"zero3"`.
        index (`int`): what is drawn, see [`draw`].
        trainer (`str`): `"stock"` or `"fused"`.
    """

    backend: str
    index: int
    trainer: str = "fused"

    processes = RANKS

    @property
    def name(self) -> str:
        return f"{self.backend}-{SEED}:{self.index}-{self.trainer}"


def _runs(backend: str, indices: Iterable[int]) -> list[Run]:
    return [Run(backend, index, trainer) for index in indices for trainer in ("stock", "fused")]


LAUNCHES = {
    "ddp": _runs("ddp", range(30)),
    "fsdp2": _runs("fsdp2", range(60, 72)),
    "zero2": _runs("zero2", range(80, 84)),
    "zero3": _runs("zero3", range(90, 102)),
}


def draw(index: int) -> dict[str, Any]:
    """Options of both trainers and of the fused one; `"lora"`; `"samples"`: with log-probs of a stand-in for vLLM."""
    drawing = Draw(f"processes {SEED}:{index}")
    options = drawing.options
    drawing.maybe(0.4, "lora", True)
    options["gradient_accumulation_steps"] = accumulation = drawing.generator.choice((1, 2, 2, 3))
    options["per_device_train_batch_size"] = drawing.generator.choice((2, 3, 4))
    drawing.maybe(0.4, "steps_per_generation", accumulation, 2 * accumulation, accumulation + 1)
    drawing.maybe(0.3, "num_iterations", 2)
    if drawing.chance(0.7):
        options["loss_type"] = drawing.generator.choice(("grpo", "bnpo", "dr_grpo", "sapo", "vespo"))
    drawing.maybe(0.2, "importance_sampling_level", "sequence")
    drawing.maybe(0.4, "beta", 0.05, 0.3)
    drawing.maybe(0.1, "delta", 2.0)
    drawing.maybe(0.2, "epsilon_high", 0.28)
    drawing.maybe(0.1, "top_entropy_quantile", 0.37)
    drawing.maybe(0.1, "entropy_coef", 0.05)
    drawing.maybe(0.2, "temperature", 0.7)
    drawing.maybe(0.2, "scale_rewards", "batch", "none")
    drawing.maybe(0.2, "mask_truncated_completions", True)
    drawing.maybe(0.2, "gradient_checkpointing", True)
    if drawing.maybe(0.5, "samples", True):
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        drawing.maybe(0.7, "vllm_importance_sampling_mode", *modes)
        drawing.maybe(0.2, "off_policy_mask_threshold", 0.1)
    drawing.maybe(0.7, "fused_max_tokens_per_forward", 0, 60, 1000)
    drawing.maybe(0.2, "fused_layout", "padded")
    drawing.maybe(0.2, "fused_backward", "recompute")
    drawing.maybe(0.2, "fused_skip_old_logps", True, False)
    drawing.maybe(0.2, "fused_verify", 1)
    drawing.maybe(0.2, "fused_skip_zero_grad_sequences", True)
    return options


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 3 + sum(ids) % 97 / 97 for ids in completion_ids]


def _generate(trainer: Any, rank: int, samples: bool) -> None:
    """Let completions come from the process's own random numbers, on rank 1 shorter ones."""

    def sample(prompts: list[Any], *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]] | None]:
        lengths = torch.randint(1, 12 - 5 * rank, (len(prompts),)).tolist()
        completions = [torch.randint(FIRST_WORD_ID, VOCAB_SIZE, (n,)).tolist() for n in lengths]
        for i in torch.randperm(len(completions))[: len(completions) // 2].tolist():  # the others are truncated
            completions[i][-1] = trainer.processing_class.eos_token_id
        logps = [(-6.9 + 0.3 * torch.randn(n)).tolist() for n in lengths]
        return completions, logps if samples else None

    trainer._generate_single_turn = sample
    if samples:
        expect_sampler(trainer)


def build(run: Run, folder: Path, rank: int) -> Any:
    """A trainer with plain SGD."""
    options = draw(run.index)
    adapts, samples = options.pop("lora", False), options.pop("samples", False)
    is_fused = run.trainer == "fused"
    args = (FusedGRPOConfig if is_fused else GRPOConfig)(
        output_dir=str(folder / "output"),
        num_generations=options["per_device_train_batch_size"],
        max_steps=4,
        max_completion_length=10,
        learning_rate=0.1,  # the weights move further than they are rounded
        bf16=False,
        **plain_sgd(),
        **launcher_options(run.backend),
        **{name: value for name, value in options.items() if is_fused or not name.startswith("fused_")},
    )
    torch.manual_seed(0)
    trainer = (FusedGRPOTrainer if is_fused else GRPOTrainer)(
        model=str(folder / "llama"),
        reward_funcs=_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 7}" + " w5" * (i % 4) for i in range(5, 69)]}),
        processing_class=tokenizer(),
        peft_config=adapter("lora") if adapts else None,
    )
    _generate(trainer, rank, samples)
    return trainer


def work(run: Run, folder: Path, rank: int) -> None:
    """Train one run."""
    if rank == 0:
        print(draw(run.index), flush=True)
    trainer = build(run, folder, rank)
    start = whole_parameters(trainer)
    trainer.train()
    moved = {name: value - start[name] for name, value in whole_parameters(trainer).items()}
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    (folder / f"{run.name}.{rank}.json").write_text(json.dumps({"logs": logs}))
    if rank == 0:
        save_file(moved, folder / f"{run.name}.safetensors")
