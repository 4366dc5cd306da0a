"""
Whole optimizer steps through `trainer.train()`: stock GRPOTrainer and FusedGRPOTrainer, each on a model of its own with
the same weights and the same completions. Scoring, loss, backward, clipping and AdamW count; generation is replaced.
Each of several processes has the same lengths, unless `--skew` gives the first longer ones.
All options are TRL's defaults (float32 weights under bf16 autocast, gradient checkpointing, `sequence_mask`) unless a
case says otherwise. The learning rate is zero, so that every step starts from the same weights.

    python benchmarks/step.py --case 0.6b --case 1.7b --json step.json
    python benchmarks/step.py --case 0.6b --arm '{"fused_compile": true}'
    python benchmarks/step.py --case 1.7b-16k --arm '{"flash": "FA4"}'
    python benchmarks/step.py --case 1.7b --arm '{"level": "rows"}' --arm '{"level": "head"}'
    python benchmarks/step.py --case 1.7b-lora-beta --options '{"vllm_importance_sampling_mode": "token_truncate"}'
    torchrun --nproc-per-node 2 benchmarks/step.py --case 1.7b-ddp
    torchrun --nproc-per-node 4 benchmarks/step.py --case 8b-lora-fsdp2 --skew 2
    python benchmarks/step.py --case tiny --device cpu
"""

import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _accumulation import GROUP, ROWS, reward
from _measure import environment, flash_attention_by
from _rollout import Rollout
from _step_cases import ALL_LINEAR, CASES, Case, model_flops
from _step_clock import StepClock, step_options
from _step_report import judge, print_records
from _trainers import SHAPES, clear_memory, forget_accelerate, make_model
from datasets import Dataset
from records import write_record
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import tokenizer


PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}  # dense bf16
LOGGED = ("loss", "grad_norm", "fused/rows_recomputed")

app = typer.Typer(add_completion=False)


class Watching(TrainerCallback):
    """Looks at nothing, but might at each micro-batch: level `rows`."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing."""


def lower(trainer: Any, level: str | None) -> None:
    """Customise a trainer so that it trains at a lower level, and the same."""
    if level == "rows":
        trainer.add_callback(Watching())
    elif level == "head":
        trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().register_forward_hook(lambda *_: None)


class Profile(TrainerCallback):
    """
    How long the GPU works in the last step, and how long of that it only exchanges with other GPUs. With a path also
    which kernels it ran, and a trace of it. Without one the CPU is not watched, which would slow it down.
    """

    def __init__(self, path: Path | None, step: int):
        self.path, self.step, self.busy_ms, self.exchanges_ms = path, step, 0.0, 0.0
        self.profiler: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start before the last step."""
        if state.global_step == self.step:
            cuda = [torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=None if self.path else cuda)
            self.profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after it."""
        if self.profiler is None:
            return
        torch.cuda.synchronize()
        self.profiler.stop()
        on_gpu = [event for event in self.profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        self.busy_ms = covered_ms(event.time_range for event in on_gpu)
        computes = (event.time_range for event in on_gpu if not event.name.startswith("nccl"))
        self.exchanges_ms = self.busy_ms - covered_ms(computes)
        if self.path is not None:
            averages = self.profiler.key_averages()
            tables = [
                averages.table(sort_by=key, row_limit=45, max_name_column_width=90)
                for key in ("self_device_time_total", "self_cpu_time_total")
            ]
            self.path.write_text("\n".join(tables))
            self.profiler.export_chrome_trace(str(self.path.with_suffix(".json.gz")))
        self.profiler = None


def covered_ms(ranges: Iterable[Any]) -> float:
    """Milliseconds in which at least one of some ranges of time, in microseconds, lasts."""
    covered = until = 0.0
    for one in sorted(ranges, key=lambda one: one.start):
        covered += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return covered / 1e3


def make_trainer(case: Case, fused: bool, rollout: Rollout, device: str, steps: int, extra: dict[str, Any]) -> Any:
    """A trainer with a model of its own."""
    forget_accelerate()
    options: dict[str, Any] = {
        **step_options(case.micro_batch, ROWS, GROUP, steps, case.lengths.longest, device),
        **case.options,
        **(extra if fused else {}),
    }
    if case.engine == "fsdp2":
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    trainer_class: Any = FusedGRPOTrainer if fused else GRPOTrainer
    lora = {**ALL_LINEAR, "lora_dropout": case.lora_dropout} if case.lora else None
    trainer = trainer_class(
        model=make_model(case.model, device, case.dtype, lora),
        reward_funcs=reward,
        args=(FusedGRPOConfig if fused else GRPOConfig)(**options),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * ROWS * _world_size()}),
        processing_class=tokenizer(),
    )
    if rollout.log_probs is not None or not case.vllm:
        rollout.serve(trainer)
        trainer.use_vllm = case.vllm
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)  # there is no engine to synchronise with
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_rollout(case: Case, device: str, skew: float = 1.0, groups: int = ROWS // GROUP) -> Rollout:
    """
    Completions with the sampler's log-probs: the model's own with some noise, in float32 where the weights are, since a
    sampler that rounds like one of the contenders would leave no rounding noise in its ratios. Those of the first
    process have `skew` times the median of the others.
    """
    median = int(case.lengths.median * (skew if _is_main() else 1))
    lengths = replace(case.lengths, median=median)
    rollout = Rollout.make(lengths, groups, GROUP, SHAPES[case.model][-1], case.seed)
    if case.vllm:
        trainer = make_trainer(
            case, True, rollout, device, 1, {"bf16": device == "cuda" and case.dtype != torch.float32}
        )
        trainer.model.to(trainer.accelerator.device)
        rollout.add_sampler_logps(trainer, case.seed)
        del trainer
        clear_memory()
    return rollout


def run_arm(
    name: str, case: Case, rollout: Rollout, device: str, steps: int, extra: dict[str, Any], profile: Path | None
) -> dict[str, Any]:
    """Train some steps, the first of which does not count unless a case says so of stock's; the record."""
    fused = name != "stock"
    first = 0 if case.counts_first_of_stock and not fused else 1
    steps -= 1 - first
    trainer = make_trainer(case, fused, rollout, device, steps, {k: v for k, v in extra.items() if k != "level"})
    lower(trainer, extra.get("level"))
    flops = model_flops(
        trainer.model,
        [(len(p), len(c)) for p, c in zip(rollout.prompts, rollout.completions, strict=True)],
        not case.lora,
    )
    clock = StepClock(device)
    trainer.add_callback(clock)
    watch = Profile(profile, steps - 1) if fused and device == "cuda" else None
    if watch is not None:
        trainer.add_callback(watch)
    start = time.perf_counter()
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        return {"name": name, "options": extra, "failed": str(error)[:200]}
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    record = {
        "name": name,
        "options": extra,
        **clock.record(first, None if watch is None else -1, rollout.tokens),  # the watched step took longer
        "has_optimizer_states": first > 0,  # AdamW makes them in its first step
        "wrapper": type(trainer.model_wrapped).__name__,
        **{key.removeprefix("fused/"): logs[-1].get(key) for key in LOGGED},
        "start_up_and_all_s": round(time.perf_counter() - start, 1),
    }
    ms = record["ms"]
    if device == "cuda" and torch.cuda.get_device_name() in PEAK_FLOPS:
        record["mfu"] = flops / (ms / 1e3) / PEAK_FLOPS[torch.cuda.get_device_name()]
    if watch is not None:
        record |= {
            "gpu_busy_ms": watch.busy_ms,
            "gpu_waits": 1 - watch.busy_ms / ms,
            "exchanges": watch.exchanges_ms / ms,
        }
    if fused:
        record["layout"] = trainer.fused_layout()
        record["level"] = trainer._fused.ladder.level.name.lower() if hasattr(trainer._fused, "ladder") else None
    return record


def run_case(
    name: str,
    case: Case,
    device: str,
    repeats: int,
    stock_repeats: int,
    arms: list[dict[str, Any]],
    profile: Path | None,
    skew: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """The records of a case: stock, ours, and ours with other options; `flash` is the FlashAttention to take."""
    start = time.perf_counter()
    rollout = make_rollout(case, device, skew)
    print(f"{name}: completions after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    about = {"case": name, "tokens": rollout.tokens, "width": rollout.width, "padding": round(rollout.padding, 4)}
    contenders: list[tuple[str, dict[str, Any]]] = [("stock", {})] * (stock_repeats > 0)
    contenders += [("ours", {}), *(("ours, " + ", ".join(f"{k}={v}" for k, v in arm.items()), arm) for arm in arms)]
    records: list[dict[str, Any]] = []
    for contender, extra in contenders:
        steps = 1 + (stock_repeats if contender == "stock" else repeats + (device == "cuda"))  # the last is watched
        title = re.sub(r"[^\w.]+", "-", f"{name}.{len(records)}")  # of the files
        path = profile.with_suffix(f".{title}.txt") if profile else None
        try:
            options = {name: value for name, value in extra.items() if name != "flash"}
            with flash_attention_by(extra.get("flash")):
                record = run_arm(contender, case, rollout, device, steps, options, path)
        except Exception as error:
            traceback.print_exc(limit=-6)
            record = {"name": contender, "options": extra, "failed": f"{type(error).__name__}: {error}"[:300]}
        records.append(about | record)
        clear_memory()
        if _is_main():
            judge(records[-1], records[0], case, device)
            shown = {k: v for k, v in records[-1].items() if k not in about and k not in ("all_ms", "options")}
            print(name, json.dumps(shown), flush=True)
        yield records[-1]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@app.command()
def main(
    case: Annotated[list[str], typer.Option(help=f"{', '.join(CASES)}; repeatable")],
    arm: Annotated[list[str] | None, typer.Option(help="further options of ours, as JSON; repeatable")] = None,
    options: Annotated[str, typer.Option(help="further options of stock and ours, as JSON")] = "{}",
    seed: Annotated[
        list[int] | None, typer.Option(help="of lengths and tokens, for the case's own; repeatable")
    ] = None,
    repeats: Annotated[int, typer.Option(help="steps that count", min=1)] = 5,
    stock_repeats: Annotated[int, typer.Option(help="the same for stock; 0 leaves it out", min=0)] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    profile: Annotated[Path | None, typer.Option(help="profile one more step of ours, into files of this name")] = None,
    skew: Annotated[float, typer.Option(help="how many times as long the first process' completions are")] = 1.0,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare whole steps; exits 1 when a trainer fails or a gradient norm of ours is wrong."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore")
    if unknown := set(case) - set(CASES):
        raise typer.BadParameter(f"no case {sorted(unknown)}: one of {', '.join(CASES)}")
    if "LOCAL_RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    arms = [json.loads(text) for text in arm or []]
    record: dict[str, Any] = {**environment(device, commit), "processes": _world_size(), "skew": skew, "results": []}
    of_both = json.loads(options)
    for name, drawn in product(case, seed or [None]):
        chosen = replace(CASES[name], options={**CASES[name].options, **of_both})
        title = ", ".join([name, *(f"{option}={value}" for option, value in of_both.items())])
        if drawn is not None:
            chosen, title = replace(chosen, seed=drawn), f"{title}, seed={drawn}"
        for entry in run_case(title, chosen, device, repeats, stock_repeats, arms, profile, skew):
            record["results"].append(entry)
            if json_path is not None and _is_main():  # a run that is cut short keeps what it has
                write_record(json_path, record)
    if _is_main():
        print_records(record["results"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if not all(entry.get("right", True) and "failed" not in entry for entry in record["results"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
