"""
Stock GRPOTrainer and FusedGRPOTrainer on two GPUs under DDP or FSDP2 in mixed precision, on the same completions, with
vLLM-style ratios and checkpointing. Loss and gradient norm of each step are compared with those of stock in float32.

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --backend ddp --precision bf16 --json results/two-gpus.json
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --backend ddp --precision no --device cpu
"""

import os
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import _accumulation
import torch
import torch.distributed as dist
import typer
from _measure import environment
from _rollout import Lengths, Rollout
from _trainers import SHAPES, forget_accelerate, make_model
from datasets import Dataset
from records import write_record
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import tokenizer


ROWS, MICRO_BATCH, GROUP, STEPS = 16, 4, 8, 3
LENGTHS = {**_accumulation.LENGTHS, "thin": Lengths(prompts=(20, 60), median=120, longest=512)}
# Three numbers are noisy: our error may be this many times that of stock, or this large
SLACK, FLOOR = 3.0, 1e-3

app = typer.Typer(add_completion=False)


def train(cls: type, size: str, backend: str, precision: str, device: str, seed: int) -> dict[str, Any]:
    """Three steps; loss, gradient norm and metrics of each."""
    forget_accelerate()
    options: dict[str, Any] = {"use_liger_loss": True} if cls is FusedGRPOTrainer else {}
    if backend == "fsdp2":
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ROWS // MICRO_BATCH,
        num_generations=GROUP,
        max_steps=STEPS,
        max_completion_length=LENGTHS[size].longest,
        vllm_importance_sampling_mode="token_truncate",
        loss_type="dapo",
        gradient_checkpointing=True,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=device == "cpu",
        **options,
    )
    trainer: Any = cls(
        model=make_model(size, device, torch.float32),
        reward_funcs=_accumulation.reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * 2 * ROWS}),
        processing_class=tokenizer(),
    )
    rollout = Rollout.make(LENGTHS[size], ROWS // GROUP, GROUP, SHAPES[size][-1], seed + dist.get_rank())
    noise = torch.Generator().manual_seed(seed)
    # A model of random weights gives every token about the same probability
    level = -torch.tensor(float(SHAPES[size][-1])).log()
    rollout.log_probs = [(level + 0.3 * torch.randn(len(ids), generator=noise)).tolist() for ids in rollout.completions]
    rollout.serve(trainer)
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)  # there is no engine to synchronise with
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    wrapper = type(trainer.model_wrapped).__name__
    return {"trainer": cls.__name__, "precision": precision, "wrapper": wrapper, "logs": logs}


@app.command()
def main(
    backend: Annotated[str, typer.Option(help="ddp or fsdp2")] = "ddp",
    precision: Annotated[str, typer.Option(help="bf16, fp16 or no, over float32 weights")] = "bf16",
    size: Annotated[str, typer.Option(help="thin or tiny")] = "thin",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare; exits 1 when ours is further from float32 than rounding explains."""
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    runs = {
        "truth": train(GRPOTrainer, size, backend, "no", device, seed),
        "stock": train(GRPOTrainer, size, backend, precision, device, seed),
        "ours": train(FusedGRPOTrainer, size, backend, precision, device, seed),
    }

    def error(name: str, key: str) -> float:
        pairs = zip(runs[name]["logs"], runs["truth"]["logs"], strict=True)
        return max(abs(a[key] - b[key]) / max(abs(b["grad_norm"]), 1e-12) for a, b in pairs)

    errors = {name: {key: error(name, key) for key in ("loss", "grad_norm")} for name in ("stock", "ours")}
    right = all(errors["ours"][key] <= max(SLACK * errors["stock"][key], FLOOR) for key in ("loss", "grad_norm"))
    if rank == 0:
        table = Table(title=f"{backend} ({runs['ours']['wrapper']}), {precision}, {dist.get_world_size()} processes")
        for column in ("trainer", "step", "loss", "gradient norm", "ratio mean", "recomputed"):
            table.add_column(column, justify="left" if column == "trainer" else "right")
        for name, run in runs.items():
            for step, log in enumerate(run["logs"]):
                ratio = log.get("sampling/importance_sampling_ratio/mean")
                recomputed = log.get("fused/rows_recomputed", "")
                figures = (f"{log['loss']:.6f}", f"{log['grad_norm']:.6f}", f"{ratio:.5f}", str(recomputed))
                table.add_row(name, str(step), *figures)
        Console(width=110).print(table)
        print(f"errors against float32: {errors}; {'right' if right else 'WRONG'}")
        if json_path is not None:
            record = {**environment(device, commit), "backend": backend, "size": size, "seed": seed}
            record |= {"precision": precision, "errors": errors, "right": right, "runs": runs}
            write_record(json_path, record)
    dist.destroy_process_group()
    if not right:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
