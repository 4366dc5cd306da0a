"""
A long training of a tiny model by `trainer.train()`, with generation and lengths that change all the time: does memory,
the number of compiled graphs or the time of a step grow? With `--faults` exceptions are thrown into it at random.

    python benchmarks/soak.py --steps 2000 --device cpu --json benchmarks/results/soak-cpu.json
    python benchmarks/soak.py --steps 500 --device cuda --jobs 3 --json benchmarks/results/soak-h200.json
    python benchmarks/soak.py --steps 300 --device cpu --faults 0.1 --arm default
"""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _faults import Faults, InjectedError, left_after_fault
from _growth import LIMITS, judged
from _left_over import left_over
from _measure import environment
from _trainers import LORA_ON_ATTENTION, make_model
from _watcher import Watcher
from datasets import Dataset
from records import write_record
from transformers import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import EOS_ID, tokenizer


# Each is a training by itself; "stock" shows what TRL's own path does in the same setting, and is not judged
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "compile": {"fused_compile": True},
    "lora": {"beta": 0.04},
    "stock": {},
}
MICRO_BATCH, WINDOW, GROUP = 4, 4, 4
LONGEST_PROMPT = 48
EOS_BIAS = 4.0  # on the logit: completions end after some twenty tokens, by chance

app = typer.Typer(add_completion=False)


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


def rewarding(faults: Faults) -> Any:
    """A reward function, into which faults may be thrown. It is not by length, so that lengths do not drift."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        faults.reach("reward")
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    return reward


def make_trainer(arm: str, device: str, longest: int, folder: str, watcher: Watcher, faults: Faults) -> Any:
    """The trainer of an arm, with prompts of all lengths."""
    torch.manual_seed(0)
    lengths = random.Random(1)
    counts = [lengths.randint(1, LONGEST_PROMPT) for _ in range(997)]
    words = [" ".join(f"w{lengths.randrange(900)}" for _ in range(count)) for count in counts]
    is_stock = arm == "stock"
    args = (GRPOConfig if is_stock else FusedGRPOConfig)(
        output_dir=folder,
        max_steps=10 * watcher.steps,  # the watcher stops it; the learning rate does not change
        lr_scheduler_type="constant",
        learning_rate=1e-6,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=WINDOW,
        num_generations=GROUP,
        max_completion_length=longest,
        generation_kwargs={"sequence_bias": [[[EOS_ID], EOS_BIAS]]},
        logging_steps=25,
        save_strategy="steps" if faults.probability else "no",
        save_steps=20,
        save_total_limit=1,
        ignore_data_skip=True,
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        report_to="none",
        disable_tqdm=True,
        seed=7,
        **ARMS[arm],
    )
    trainer: Any = (GRPOTrainer if is_stock else FusedGRPOTrainer)(
        model=make_model("tiny", device, torch.float32, LORA_ON_ATTENTION if arm == "lora" else None),
        reward_funcs=rewarding(faults),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": words}),
        processing_class=tokenizer(),
        callbacks=[watcher, faults],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(arm: str, device: str, steps: int, every: int, longest: int, probability: float, seed: int) -> dict[str, Any]:
    """Train an arm to its end, and judge."""
    watcher, faults = Watcher(steps, every, seed), Faults(probability, seed)
    warm_up = max(steps // 5, min(100, steps // 2))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arm, device, longest, folder, watcher, faults)
        watcher.trainer, watcher.steps, faults.probability = trainer, 2, 0.0
        trainer.train()  # what a training that ends by itself leaves behind
        watcher.steps, faults.probability, clean = steps, probability, left_over(trainer)
        gc.collect()
        gc.freeze()  # modules and models stay: a sample need not look at them
        left, starts = _until_done(trainer, watcher, faults, clean, folder)
        summary = {line.name: line.value for line in _summary(trainer)}
    grown = {name: sizes[:8] for name, sizes in watcher.grown.items() if len(sizes) > 1}
    result: dict[str, Any] = {
        "name": arm,
        "steps": steps,
        **judged(watcher.samples, warm_up),
        "caches_that_changed": grown,
    }
    if probability:
        result["problems"] += left
        result |= {"faults": dict(faults.thrown), "starts": starts, "right": not result["problems"]}
    return {**result, "does": summary}


def _summary(trainer: Any) -> list[Any]:
    return [] if not hasattr(trainer, "fused_summary") else list(trainer.fused_summary())


def _until_done(trainer: Any, watcher: Watcher, faults: Faults, clean: dict, folder: str) -> tuple[list[str], int]:
    """Start the training again after each fault, from the last checkpoint or as it is, in turns."""
    problems: list[str] = []
    starts, resumes = 0, False
    with faults.in_place():
        while watcher.done < watcher.steps:
            starts += 1
            try:
                trainer.train(resume_from_checkpoint=(resumes and get_last_checkpoint(folder)) or None)
                continue
            except InjectedError as error:
                place = str(error)
            after = left_after_fault(trainer, clean)
            problems += [
                f"after a fault in {place}, {name}: {after[name]} instead of {clean[name]}"
                for name in clean
                if after[name] != clean[name]
            ]
            resumes = not resumes
    return problems[:20], starts


def _in_process(arm: str, arguments: list[str]) -> dict[str, Any]:
    """An arm in a process of its own: memory and caches are those of this arm alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arm.json"
        command = [sys.executable, __file__, "--arm", arm, "--in-process", "--json", str(path), *arguments]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
        if not path.exists():
            tail = (done.stdout + done.stderr)[-3000:]
            return {"name": arm, "right": False, "problems": [f"exit code {done.returncode}: {tail}"]}
        return json.loads(path.read_text())


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=50, help="optimizer steps of each arm")] = 500,
    device: Annotated[Device, typer.Option(help="where to train")] = Device.cpu,
    arm: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ARMS)}: one; may be repeated")] = None,
    every: Annotated[int, typer.Option(help="steps between two samples")] = 10,
    longest: Annotated[int, typer.Option(help="tokens of the longest completion")] = 64,
    faults: Annotated[float, typer.Option(help="probability that a step throws")] = 0.0,
    seed: Annotated[int, typer.Option(help="of lengths and faults")] = 0,
    jobs: Annotated[int, typer.Option(help="arms at a time")] = 1,
    commit: Annotated[str | None, typer.Option(help="for the record, where there is no git")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", hidden=True)] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the record")] = None,
) -> None:
    """Soak, and exit with 1 when something grows or is left over."""
    arms = arm or list(ARMS)
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device.")
    if in_process:
        # In half precision stock's padded rows get NaN gradients from it, and generation raises (nan_gradients.py)
        torch.backends.cuda.enable_cudnn_sdp(False)
        result = train(arms[0], device.value, steps, every, longest, faults, seed)
        assert json_file is not None
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        json_file.write_text(json.dumps(result))
        return
    arguments = ["--steps", str(steps), "--device", device.value, "--every", str(every), "--longest", str(longest)]
    arguments += ["--faults", str(faults), "--seed", str(seed)]
    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda name: _in_process(name, arguments), arms))
    for result in results:
        typer.echo(json.dumps({key: value for key, value in result.items() if key != "does"}))
    right = all(result["right"] for result in results if result["name"] != "stock")
    record = {**environment(device.value, commit), "limits_per_1000_steps": LIMITS, "results": results, "right": right}
    if json_file:
        write_record(json_file, record)
    seconds = time.perf_counter() - started
    typer.echo(f"{len(results)} arms of {steps} steps in {seconds:.0f} s: {'right' if right else 'WRONG'}")
    raise typer.Exit(not right)


if __name__ == "__main__":
    app()
