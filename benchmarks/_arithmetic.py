"""The arithmetic task of the example as an experiment: a start of each seed, and the arms that train from it."""

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from _trainers import clear_memory, forget_accelerate
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_arithmetic as task


@dataclass(frozen=True)
class Arm:
    """A trainer, the attention of its model, and its options."""

    fused: bool = False
    attention: str = "sdpa"
    options: dict[str, Any] = field(default_factory=dict)


# The null differs from stock by rounding alone, and nobody would call it another training. On CUDA all rows of such a
# small head are one chunk of logits; with half a MiB there are eight, as a large vocabulary has by default
ARMS = {
    "stock": Arm(),
    "null": Arm(attention="eager"),
    "ours": Arm(fused=True),
    "ours, in chunks": Arm(fused=True, options={"fused_logits_mib": 0.5}),
}


@dataclass(frozen=True)
class Setting:
    """
    What all arms and seeds have in common.

    Args:
        steps (`int`): optimizer steps.
        pretrain_steps (`int`): supervised steps on the careless pupil's sums, before.
        batch (`int`): completions of a generation, and of an optimizer step.
        micro_batch (`int`): completions of a micro-batch.
        iterations (`int`): optimizer steps of each generation; after the first the ratios are not 1.
        vocab (`int`): tokens, most of them never used.
        held_out (`int`): sums that accuracy is measured on, never trained on.
        learning_rate, beta (`float`): of GRPO.
    """

    steps: int = 200
    pretrain_steps: int = 400
    batch: int = 256
    micro_batch: int = 128
    iterations: int = 2
    vocab: int = 2048
    held_out: int = 3000
    learning_rate: float = 1e-4
    beta: float = 0.01


class Start:
    """
    What the arms of a seed share: tokenizer, sums, and a pre-trained checkpoint.

    Args:
        seed (`int`): of weights, sums and sampling.
        setting ([`Setting`]): sizes.
        device (`str`): `"cuda"` or `"cpu"`.
        folder (`Path`): of the checkpoints of all seeds; [`Start.pretrain`] makes this seed's.
    """

    def __init__(self, seed: int, setting: Setting, device: str, folder: Path):
        self.seed, self.setting, self.device = seed, setting, device
        self.folder = folder / f"seed-{seed}"
        transformers.set_seed(seed)
        self.tokenizer = task.make_tokenizer()
        self.tokenizer.add_tokens([f"<spare{index}>" for index in range(setting.vocab - len(self.tokenizer))])
        sums, held_out = task.draw_sums(seed)
        more = max(0, setting.held_out - len(held_out))
        self.sums, self.held_out = sums[more:], (held_out + sums[:more])[: setting.held_out]

    def pretrain(self) -> float:
        """Make the checkpoint; its accuracy."""
        model = task.make_model(self.tokenizer).to(self.device)
        task.pretrain(model, self.tokenizer, self.sums, self.setting.pretrain_steps)
        model.save_pretrained(self.folder)
        return self.accuracy_of(model)

    def accuracy_of(self, model: Any) -> float:
        """Fraction of the held-out sums answered right by greedy decoding."""
        return task.accuracy(model, self.tokenizer, self.held_out)

    def trainer(self, arm: Arm, **options: Any) -> Any:
        """A trainer of this arm at the start. `options` go to its configuration."""
        forget_accelerate()
        setting = self.setting
        defaults: dict[str, Any] = {
            "output_dir": str(self.folder),
            "model_init_kwargs": {"dtype": "float32", "attn_implementation": arm.attention},
            "per_device_train_batch_size": setting.micro_batch,
            "gradient_accumulation_steps": setting.batch // setting.micro_batch,
            "num_generations": 8,
            "num_iterations": setting.iterations,
            "max_completion_length": 4,
            "max_steps": setting.steps,
            "learning_rate": setting.learning_rate,
            "beta": setting.beta,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": min(20, setting.steps),
            "adam_beta2": 0.99,
            "bf16": True,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": self.seed,
            "use_cpu": self.device == "cpu",
        }
        defaults |= {"use_liger_loss": True} if arm.fused else {}
        trainer_class: Any = FusedGRPOTrainer if arm.fused else GRPOTrainer
        trainer = trainer_class(
            model=str(self.folder),
            reward_funcs=task.correct_sum,
            args=(FusedGRPOConfig if arm.fused else GRPOConfig)(**(defaults | arm.options | options)),
            train_dataset=Dataset.from_list([{"prompt": each.prompt} for each in self.sums]),
            processing_class=self.tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


def be_quiet() -> None:
    """One thread, no warnings, no progress bars: many processes share the machine and the terminal."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def start_process(numbers: Any) -> None:
    """In a new process: it takes the next number of a queue, and the GPU of that number, around the last one."""
    be_quiet()
    count = torch.cuda.device_count()
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[numbers.get() % count]  # CUDA has not started in this process


def _in_time(until: float, work: Callable[..., Any], arguments: tuple) -> tuple[Any, str | None]:
    """Do a piece of work unless it would hardly be done in time: what comes of it, and what went wrong."""
    begin = time.time()
    if begin + _longest.get(work, 0.0) > until:
        return None, None
    try:
        result = work(*arguments)
    except Exception:
        return None, traceback.format_exc()
    clear_memory()
    _longest[work] = max(_longest.get(work, 0.0), time.time() - begin)
    return result, None


_longest: dict[Callable[..., Any], float] = {}  # seconds that each kind of work took in this process


class Workers:
    """
    Processes that share the devices: each has one of them.

    Args:
        count (`int`): how many; with one the work is done in this process.
        limit (`float`): seconds after which no work begins that would not be done by then. What it leaves out depends
            on the order of the work alone, not on what comes of it.

    Attributes:
        failures (`int`): pieces of work that raised; their tracebacks are printed.
    """

    def __init__(self, count: int, limit: float):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.until, self.failures = time.time() + limit, 0
        self.pool = None
        if count > 1:
            context = get_context("spawn")
            numbers = context.SimpleQueue()
            for number in range(count):
                numbers.put(number)
            self.pool = ProcessPoolExecutor(count, context, start_process, (numbers,))

    def each(self, work: Callable[..., Any], tasks: Iterable[tuple]) -> Iterator[Any]:
        """What comes of `work`, a function of a module, with the arguments of each task, as soon as it is there."""
        for result, failure in self._done(work, tasks):
            if failure is not None:
                self.failures += 1
                print(failure, flush=True)
            if result is not None:
                yield result

    def _done(self, work: Callable[..., Any], tasks: Iterable[tuple]) -> Iterator[tuple[Any, str | None]]:
        if self.pool is None:
            be_quiet()
            yield from (_in_time(self.until, work, arguments) for arguments in tasks)
        else:
            futures = [self.pool.submit(_in_time, self.until, work, arguments) for arguments in tasks]
            yield from (future.result() for future in as_completed(futures))

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.shutdown()


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def curve(logs: list[dict[str, Any]], name: str, width: int) -> list[float]:
    """What a trainer logged under a name: the mean of every `width` steps, some of which may not have it."""
    values: dict[int, list[float]] = {}
    for log in logs:
        if name in log:
            values.setdefault((log["step"] - 1) // width, []).append(log[name])
    return [rounded(sum(part) / len(part)) for part in values.values()]
