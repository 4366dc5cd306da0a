"""Teach a small transformer to add: first from the sums of a careless pupil, then by a reward that checks the answer.

The model, its tokenizer and its data are made here, so nothing is downloaded. Pre-training shows written-out sums like
`37+48=085`, but the pupil who wrote them forgot three carries in four (`37+48=075`), and the model learns that too.
From there `FusedGRPOTrainer` takes over: it sees no answers any more, only whether its own were right, and learns to
carry. Accuracy is measured on sums that neither phase has seen.

    python examples/train_arithmetic.py             # writes reward_curve.png
    python examples/train_arithmetic.py --compare   # trains stock TRL from the same start too and overlays its curve
"""

from __future__ import annotations

import copy
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import trl
import typer
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from trl_fused_grpo import FusedGRPOTrainer


HELD_OUT = 1000  # sums kept for measuring accuracy, of 10,000
FORGOTTEN = 0.75  # how many carries the pupil forgets
CLEAR_RISE = 0.1  # a smaller gain in accuracy counts as a failure
SMOOTHING = 10  # steps averaged for the curve and for the first and last reward

console = Console()


@dataclass(frozen=True)
class Sum:
    """One sum of two numbers below 100, as the model reads and writes it."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a:02d}+{self.b:02d}="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b:03d}"

    @property
    def without_carry(self) -> str:
        """The answer of someone who forgets to carry from the units to the tens."""
        carried = 10 if self.a % 10 + self.b % 10 > 9 else 0
        return f"{self.a + self.b - carried:03d}"


@dataclass
class Run:
    """What one GRPO training left behind; `rewards` and `recomputed` hold one value a step."""

    name: str
    accuracy: float
    rewards: list[float]
    recomputed: list[float]
    seconds: float


def draw_sums(seed: int) -> tuple[list[Sum], list[Sum]]:
    """All sums in random order, split into those to train on and those held out."""
    sums = [Sum(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of a sum."""
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """A Qwen3 of 1.8 million parameters with fresh weights."""
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=48,
        max_position_embeddings=64,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return transformers.Qwen3ForCausalLM(config).to(device)


def correct_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """The reward: 1 where the completion is the sum that the prompt asks for, otherwise 0."""
    rewards: list[float | None] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        a, b = prompt.rstrip("=").split("+")
        # decoding puts a space between tokens
        rewards.append(float(completion.replace(" ", "") == Sum(int(a), int(b)).answer))
    return rewards


@torch.no_grad()
def accuracy(model: Any, tokenizer: transformers.PreTrainedTokenizerFast, sums: list[Sum]) -> float:
    """Fraction of `sums` answered right by greedy decoding."""
    was_training = model.training
    model.eval()
    prompts = [each.prompt for each in sums]
    batch = tokenizer(prompts, return_tensors="pt").to(model.device)
    tokens = model.generate(**batch, max_new_tokens=4, do_sample=False)  # [sums, prompt + answer]
    answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return correct_sum(prompts, answers).count(1.0) / len(sums)


def pretrain(
    model: Any,
    tokenizer: transformers.PreTrainedTokenizerFast,
    sums: list[Sum],
    steps: int,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Trains `model` in place on the pupil's sums: `steps` optimizer steps of 128 sums, `tick` called after each."""

    def written(answers: list[str]) -> torch.Tensor:
        lines = [each.prompt + answer for each, answer in zip(sums, answers, strict=True)]
        tokens = tokenizer(lines, return_tensors="pt").input_ids
        ends = torch.full((len(lines), 1), tokenizer.eos_token_id)
        return torch.cat([tokens, ends], dim=1).to(model.device)  # [sums, prompt + answer + 1]

    right = written([each.answer for each in sums])
    careless = written([each.without_carry for each in sums])
    prompt_length = len(sums[0].prompt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    # up over 50 steps, down over the last quarter
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, 4 * (steps - step) / steps)
    )
    model.train()
    for _ in range(steps):
        drawn = torch.randint(len(sums), (128,), device=model.device)
        forgets = torch.rand(128, 1, device=model.device) < FORGOTTEN
        batch = torch.where(forgets, careless[drawn], right[drawn])
        logits = model(batch[:, :-1]).logits[:, prompt_length - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, prompt_length:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        tick()


class Ticker(transformers.TrainerCallback):
    """Moves a progress bar by one at every training step."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.tick()


def train(
    trainer_class: type[trl.GRPOTrainer],
    model: Any,
    tokenizer: transformers.PreTrainedTokenizerFast,
    sums: list[Sum],
    held_out: list[Sum],
    steps: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Run:
    """Trains a copy of `model` with GRPO and `correct_sum`; `settings` go to `trl.GRPOConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        defaults: dict[str, Any] = {
            "output_dir": folder,
            "use_liger_loss": issubclass(trainer_class, FusedGRPOTrainer),
            "per_device_train_batch_size": 256,
            "num_generations": 8,
            "max_completion_length": 4,
            "max_steps": steps,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 20,
            "adam_beta2": 0.99,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": seed,
        }
        trainer = trainer_class(
            model=copy.deepcopy(model),
            reward_funcs=correct_sum,
            args=trl.GRPOConfig(**(defaults | settings)),
            train_dataset=Dataset.from_list([{"prompt": each.prompt} for each in sums]),
            processing_class=tokenizer,
            callbacks=[Ticker(tick)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return Run(
        name=trainer_class.__name__,
        accuracy=accuracy(trainer.model, tokenizer, held_out),
        rewards=[entry["reward"] for entry in logs],
        recomputed=[entry["fused/rows_recomputed"] for entry in logs if "fused/rows_recomputed" in entry],
        seconds=seconds,
    )


def draw_curve(runs: list[Run], path: Path) -> None:
    """Draws the mean reward of each run against the training step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run, color, style in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=False):
        width = min(SMOOTHING, len(run.rewards))
        smooth = np.convolve(run.rewards, np.full(width, 1 / width), mode="valid")
        steps = np.arange(1, len(run.rewards) + 1)
        axes.plot(steps, run.rewards, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps[width - 1 :], smooth, color=color, linestyle=style, linewidth=2, label=run.name)
    axes.set(
        xlabel="training step",
        ylabel="mean reward (fraction of sums right)",
        title=f"GRPO on two-digit sums (bold: mean of {SMOOTHING} steps)",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def summary(untrained: float, pretrained: float, pretrain_seconds: float, runs: list[Run]) -> Table:
    """The closing table, a column for each run."""
    table = Table(title="Adding two-digit numbers")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(label: str, values: list[str]) -> None:
        table.add_row(label, *values)

    row("held-out accuracy, fresh weights", [f"{untrained:.1%}"] * len(runs))
    row("held-out accuracy, pre-trained", [f"{pretrained:.1%}"] * len(runs))
    row("held-out accuracy, after GRPO", [f"[bold]{run.accuracy:.1%}[/bold]" for run in runs])
    row(f"mean reward, first {SMOOTHING} steps", [f"{np.mean(run.rewards[:SMOOTHING]):.3f}" for run in runs])
    row(f"mean reward, last {SMOOTHING} steps", [f"{np.mean(run.rewards[-SMOOTHING:]):.3f}" for run in runs])
    row("pre-training time", [f"{pretrain_seconds:.0f} s"] * len(runs))
    row("GRPO time", [f"{run.seconds:.0f} s" for run in runs])
    row("rows recomputed", [f"{np.mean(run.recomputed):.2%}" if run.recomputed else "-" for run in runs])
    return table


def main(
    compare: Annotated[bool, typer.Option("--compare", help="Train stock TRL from the same start as well.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 150,
    pretrain_steps: Annotated[int, typer.Option(min=1, help="Supervised steps before GRPO.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the sums and the sampling.")] = 0,
    curve: Annotated[Path, typer.Option(help="Where to write the reward curve.")] = Path("reward_curve.png"),
) -> None:
    """Pre-trains a small transformer on careless sums, then trains it with GRPO until it adds well."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # matrices this small gain little from more, and lose much on a busy machine
    transformers.logging.set_verbosity_error()
    transformers.set_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    sums, held_out = draw_sums(seed)
    untrained = accuracy(model, tokenizer, held_out)

    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("pre-training on careless sums", total=pretrain_steps)
        started = time.perf_counter()
        pretrain(model, tokenizer, sums, pretrain_steps, tick=lambda: progress.advance(task))
        pretrain_seconds = time.perf_counter() - started
        pretrained = accuracy(model, tokenizer, held_out)

        runs = []
        for trainer_class in (FusedGRPOTrainer, trl.GRPOTrainer)[: 2 if compare else 1]:
            task = progress.add_task(f"GRPO with {trainer_class.__name__}", total=steps)
            tick = lambda task=task: progress.advance(task)  # noqa: E731
            runs.append(train(trainer_class, model, tokenizer, sums, held_out, steps, seed, tick))

    draw_curve(runs, curve)
    console.print(summary(untrained, pretrained, pretrain_seconds, runs))
    console.print(f"Reward curve: {curve}")
    if runs[0].accuracy < pretrained + CLEAR_RISE:
        console.print(f"[red]Held-out accuracy rose by less than {CLEAR_RISE:.0%} of the sums.[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
