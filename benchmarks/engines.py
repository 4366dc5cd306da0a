"""
Stock GRPOTrainer and FusedGRPOTrainer under each engine, on the same completions, with vLLM-style ratios by token,
gradient checkpointing and AdamW. Ours is compared with stock in float32. In bfloat16 both have an error against that,
a time of a step and a peak memory. Cases are `ddp`, `fsdp1`, `fsdp2`, `zero2` and `zero3`, each with all weights or, as
`zero3-lora`, with adapters; `fsdp2-images`; and `qlora` on one process. One launch runs several.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/engines.py --case fsdp --case zero3-lora --json engines.json
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/engines.py --case ddp --size tiny --device cpu
    PYTHONPATH=. python benchmarks/engines.py --case qlora
"""

import json
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _accumulation import reward
from _architecture_models import IMAGE_SIDE, SPECIAL, VOCAB, make_architecture
from _architectures import ARCHITECTURES
from _images import ImageRollout
from _measure import environment
from _rollout import Lengths, Rollout
from _step_cases import ALL_LINEAR, TINY_LENGTHS
from _step_clock import GIB, StepClock, step_options
from _trainers import SHAPES, clear_memory, forget_accelerate, make_model, with_adapters
from datasets import Dataset
from records import write_record
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from tests.distributed.engines import engine_options, launcher_options, parameter_kind, wrapper_and_parameters
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import tokenizer


ROWS, MICRO_BATCH, GROUP, STEPS = 16, 4, 8, 3
LENGTHS = Lengths(prompts=(20, 60), median=250, longest=1024)
ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")
CASES = (*(engine + weights for engine in ENGINES for weights in ("", "-lora")), "fsdp2-images", "qlora")
# Whether it is ours, and in what precision
ARMS = {
    "stock, float32": (False, torch.float32),
    "ours, float32": (True, torch.float32),
    "stock": (False, torch.bfloat16),
    "ours": (True, torch.bfloat16),
}
COMPARED = ("loss", "grad_norm")
FLOAT32_LIMIT = 1e-4  # of the gradient norm; AdamW's first step is the sign of a gradient, however small
# Three numbers are noisy: in bfloat16 our error may be this many times that of stock, or a unit in its last place
SLACK, FLOOR = 3.0, 7.8e-3

app = typer.Typer(add_completion=False)


def model_of(case: str, size: str, device: str, dtype: torch.dtype) -> Any:
    """The model of a case, with float32 weights; `dtype` is that in which 4-bit layers compute."""
    if case.endswith("images"):
        return make_architecture(ARCHITECTURES["qwen3-vl-images"], _architecture_size(size), device)
    model = make_model(size, device, torch.float32, ALL_LINEAR if case.endswith("-lora") else None)
    if case != "qlora":
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=four_bits, dtype=torch.float32, device_map={"": device}
        )
    torch.manual_seed(0)
    return with_adapters(model, ALL_LINEAR)


def rollout_of(case: str, size: str, seed: int, config: Any) -> Rollout:
    """The completions of this process, with log-probs of a sampler."""
    has_images = case.endswith("images")
    vocab = VOCAB[_architecture_size(size)] - SPECIAL if has_images else SHAPES[size][-1]
    rollout = Rollout.make(_lengths(size), ROWS // GROUP, GROUP, vocab, seed + _rank())
    if has_images:
        rollout = ImageRollout.of(rollout, config, IMAGE_SIDE[_architecture_size(size)], GROUP, seed + _rank())
    noise = torch.Generator().manual_seed(seed)
    # A model of random weights gives every token about the same probability
    level = -torch.tensor(float(vocab)).log()
    rollout.log_probs = [(level + 0.3 * torch.randn(len(ids), generator=noise)).tolist() for ids in rollout.completions]
    return rollout


def train(case: str, arm: str, size: str, device: str, seed: int) -> dict[str, Any]:
    """Three steps: loss and gradient norm of each, time and peak memory, and what held the model."""
    forget_accelerate()
    before = torch.cuda.memory_allocated() / GIB if device == "cuda" else None
    is_fused, dtype = ARMS[arm]
    engine, is_mixed = case.split("-")[0], dtype == torch.bfloat16
    launched = {"bf16": is_mixed, **engine_options(engine)}
    if device == "cpu" and engine in ENGINES:
        launched = {"bf16": False, "use_cpu": False, **launcher_options(engine, "bf16" if is_mixed else "no")}
    options: dict[str, Any] = {
        **step_options(MICRO_BATCH, ROWS, GROUP, STEPS, _lengths(size).longest, device),
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "vllm_importance_sampling_mode": "token_truncate",
        "loss_type": "dapo",
        "max_grad_norm": 1e9,
        **launched,
    }
    model = model_of(case, size, device, dtype)
    rollout = rollout_of(case, size, seed, model.config)
    examples = rollout.examples() * (dist.get_world_size() if dist.is_initialized() else 1)
    trainer_class: Any = FusedGRPOTrainer if is_fused else GRPOTrainer
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=(FusedGRPOConfig if is_fused else GRPOConfig)(**options),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer(),
    )
    if case == "qlora" and not is_mixed:  # TRL has made the adapters bfloat16
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    rollout.serve(trainer)
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)  # there is no engine to synchronise with
    trainer.remove_callback(PrinterCallback)
    clock = StepClock(device)
    trainer.add_callback(clock)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    wrapper = wrapper_of(trainer, engine)
    if engine.startswith("zero"):
        trainer.model_wrapped.destroy()  # DeepSpeed's engine refers to itself
    return {
        "case": case,
        "name": arm,
        "wrapper": wrapper,
        **clock.record(1, None, rollout.tokens),
        "before_gib": before,  # what the trainings before have left
        **{key: [log[key] for log in logs] for key in COMPARED},
        "ratio": logs[-1]["sampling/importance_sampling_ratio/mean"],
        **({"layout": trainer.fused_layout(), "recomputed": logs[-1]["fused/rows_recomputed"]} if is_fused else {}),
        **({"level": trainer._fused.ladder.level.name.lower()} if is_fused else {}),
    }


def wrapper_of(trainer: Any, engine: str) -> str:
    """
    The class that holds the model.

    Raises:
        `RuntimeError`: when it is not the one of the engine.
    """
    wrapper = type(trainer.model_wrapped).__name__
    if engine in ENGINES:
        kinds = sorted({parameter_kind(parameter) for parameter in trainer.model_wrapped.parameters()})
        if (wrapper, kinds) != wrapper_and_parameters(engine, type(trainer.model).__name__.removeprefix("FSDP")):
            raise RuntimeError(f"{engine} has made a {wrapper} with {kinds} of the model")
    return wrapper


def judge(runs: list[dict[str, Any]]) -> None:
    """Add to ours and to stock in bfloat16 their errors against stock in float32, and to ours whether it is right."""
    truth, ours_in_float32, stock, ours = runs
    for run in runs[1:]:
        run["errors"] = {
            key: max(abs(a - b) / norm for a, b, norm in zip(run[key], truth[key], truth["grad_norm"], strict=True))
            for key in COMPARED
        }
    ours_in_float32["right"] = max(ours_in_float32["errors"].values()) <= FLOAT32_LIMIT
    ours["right"] = all(ours["errors"][key] <= max(SLACK * stock["errors"][key], FLOOR) for key in COMPARED)
    ours["time_ratio"] = ours["ms"] / stock["ms"]
    ours["memory_ratio"] = ours["peak_gib"] / stock["peak_gib"] if ours["peak_gib"] else None


def run_case(case: str, size: str, device: str, seed: int) -> list[dict[str, Any]]:
    """The records of a case, one for each arm."""
    runs = []
    try:
        for arm in ARMS:
            runs.append(train(case, arm, size, device, seed))
            clear_memory()
            if _rank() == 0:
                print(json.dumps(runs[-1]), flush=True)
        judge(runs)
    except Exception as error:
        traceback.print_exc()
        runs.append({"case": case, "name": arm, "failed": f"{type(error).__name__}: {error}"[:300], "right": False})
    return runs


def _lengths(size: str) -> Lengths:
    return TINY_LENGTHS if size == "tiny" else LENGTHS


def _architecture_size(size: str) -> str:
    return "tiny" if size == "tiny" else "real"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def print_records(records: list[dict[str, Any]]) -> None:
    """One row an arm."""
    table = Table(title="Three steps under each engine; errors against stock in float32, relative to the gradient norm")
    for column in ("case", "name", "wrapper", "ms", "GiB", "loss", "gradient norm", "level", "right"):
        table.add_column(column)
    for record in records:
        errors = [f"{record['errors'][key]:.1e}" if "errors" in record else "" for key in COMPARED]
        figures = [f"{record[key]:.2f}" if record.get(key) else "" for key in ("ms", "peak_gib")]
        words = [str(record.get(key, "")) for key in ("level", "right")]
        wrapper = record.get("wrapper", record.get("failed"))
        table.add_row(record["case"], record["name"], wrapper, *figures, *errors, *words)
    Console(width=150).print(table)


@app.command()
def main(
    case: Annotated[list[str], typer.Option(help=f"all that begin so, of {', '.join(CASES)}; repeatable")],
    size: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}; images have tiny and another")] = "0.6b",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    seed: Annotated[int, typer.Option(help="of lengths, tokens and noise")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare; exits 1 when a case fails or ours is further from stock than rounding explains."""
    warnings.simplefilter("ignore")
    if not (chosen := [name for name in CASES if name.startswith(tuple(case))]):
        raise typer.BadParameter(f"no case {case}: one of {', '.join(CASES)}")
    if "LOCAL_RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    record: dict[str, Any] = {**environment(device, commit), "size": size, "seed": seed, "results": []}
    for name in chosen:
        record["results"] += run_case(name, size, device, seed)
        if json_path is not None and _rank() == 0:  # a run that is cut short keeps what it has
            write_record(json_path, record)
    right = [entry["right"] for entry in record["results"] if "right" in entry]
    if _rank() == 0:
        print_records(record["results"])
        print(f"{sum(right)} of {len(right)} right")
    if dist.is_initialized():
        dist.destroy_process_group()
    if not all(right):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
