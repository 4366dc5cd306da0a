"""
Optimizer steps of TRL's experimental `AsyncGRPOTrainer`, stock and ours, on the same made-up samples: a row a step, of
at most the token budget. By default that is what vLLM would say, the longest sequence of the model. Forward, backward,
clipping and AdamW count; the learning rate is zero. Stock's FlashAttention 3 is that of `peers.py`.

    python benchmarks/async_step.py --json async.json
    python benchmarks/async_step.py --case tiny --device cpu --budget 256
"""

import json
import os
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import environment
from _step_clock import step_options
from peers import WARM_UP, async_trainer, prepare, roomy_memory, timed_training
from records import write_record


app = typer.Typer(add_completion=False)


def run_arm(fused: bool, folder: Path, work: dict[str, Any], device: str, repeats: int, budget: int) -> dict[str, Any]:
    """Train some steps; their time, peak and what they computed."""
    options = step_options(1, 1, work["group"], WARM_UP + repeats, work["longest"], device)
    trainer, attention = async_trainer(folder, work, device, fused, token_budget=budget, **options)
    try:
        record = timed_training(trainer, {"tokens": budget}, device)
    except torch.OutOfMemoryError as error:
        return {"name": "ours" if fused else "stock", "failed": str(error)[:200]}
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    for name in ("batch/forwarded_tokens_per_step", "batch/trained_tokens_per_step"):
        record[name.rpartition("/")[2]] = [entry[name] for entry in logs[WARM_UP:]]
    record["losses"] = [entry["loss"] for entry in logs]
    record["grad_norms"] = [entry["grad_norm"] for entry in logs]
    if fused:
        record["rows_recomputed"] = max(entry["fused/rows_recomputed"] for entry in logs)
        record["fused"] = trainer._fused.is_on
    return {"name": "ours" if fused else "stock", **record, "attention": None if fused else attention}


@app.command()
def main(
    case: Annotated[str, typer.Option(help="a case of step.py, for its model and lengths")] = "1.7b",
    budget: Annotated[int, typer.Option(help="tokens of a row")] = 40_960,
    groups: Annotated[int, typer.Option(help="prompts, of eight samples each: of more tokens than a row")] = 32,
    repeats: Annotated[int, typer.Option(help="steps that count", min=1)] = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Time a step of each."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore")
    record: dict[str, Any] = {**environment(device, commit), "case": case, "budget": budget, "results": []}
    with tempfile.TemporaryDirectory(dir=roomy_memory()) as temporary:
        folder = Path(temporary)
        prepare(case, folder, device, groups)
        work = json.loads((folder / "work.json").read_text())
        for fused in (False, True):
            # In a process of its own: a thread of TRL's, which does not end, refers to the trainer
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                record["results"].append(alone.submit(run_arm, fused, folder, work, device, repeats, budget).result())
            print(json.dumps(record["results"][-1]), flush=True)
    stock, ours = record["results"]
    if "ms" in stock and "ms" in ours:
        record["time"] = ours["ms"] / stock["ms"]
        record["memory"] = ours["peak_gib"] / stock["peak_gib"] if device == "cuda" else None
        print(json.dumps({name: record[name] for name in ("time", "memory")}))
    if json_path is not None:
        write_record(json_path, record)


if __name__ == "__main__":
    app()
