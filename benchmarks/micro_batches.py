"""
Does the gradient depend on how a batch is cut into micro-batches? Loss and gradient norm of one optimizer step, stock
GRPOTrainer and FusedGRPOTrainer, on the same completions of unequal lengths, for each loss type and size of a
micro-batch. A step of all completions at once is the reference.

    python benchmarks/micro_batches.py --json micro-batches.json
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _accumulation import GROUP, ROWS
from _measure import environment
from _rollout import Rollout
from _step_cases import CASES
from _trainers import SHAPES
from records import write_record
from rich.console import Console
from rich.table import Table
from step import make_trainer


# The reduction of each loss type, under its name in `FusedLinearGRPOLoss`
REDUCTIONS = {
    "dapo": "token_mean",
    "cispo": "token_mean",
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "fixed_length",
    "luspo": "sequence_sum",
    "bnpo": "token_mean of the micro-batch",
}
SIZES = (1, 2, 4, 8, 16, 32)


def one_step(loss_type: str, size: int, fused: bool, rollout: Rollout) -> dict[str, float]:
    """Loss and gradient norm of a step in micro-batches of a size."""
    options: dict[str, Any] = {"loss_type": loss_type, "vllm_importance_sampling_mode": "token_truncate"}
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    case = replace(CASES["tiny"], micro_batch=size, options=options)
    trainer = make_trainer(case, fused, rollout, "cpu", 1, {})
    trainer.train()
    [logs] = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}


def make_rollout() -> Rollout:
    """Completions with the log-probs of a sampler that is the model itself, with noise."""
    case = CASES["tiny"]
    rollout = Rollout.make(case.lengths, ROWS // GROUP, GROUP, SHAPES[case.model][-1], case.seed)
    trainer = make_trainer(case, True, rollout, "cpu", 1, {})
    rollout.add_sampler_logps(trainer, case.seed)
    return rollout


def main(
    loss_type: Annotated[list[str] | None, typer.Option(help=f"{', '.join(REDUCTIONS)}; repeatable")] = None,
    size: Annotated[list[int] | None, typer.Option(help="sequences in a micro-batch; repeatable")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
) -> None:
    """Compare micro-batch sizes; exits 1 where ours differs from stock."""
    warnings.simplefilter("ignore")
    rollout, entries = make_rollout(), []
    for name in loss_type or REDUCTIONS:
        for count in size or SIZES:
            stock, ours = (one_step(name, count, fused, rollout) for fused in (False, True))
            difference = abs(ours["grad_norm"] - stock["grad_norm"]) / stock["grad_norm"]
            entries.append(
                {"loss_type": name, "micro_batch": count, "stock": stock, "ours": ours, "right": difference < 1e-5}
            )
    if json_path is not None:
        write_record(json_path, {**environment("cpu", None), "completions": ROWS, "results": entries})
    table = Table(title=f"One optimizer step of {ROWS} completions: loss, gradient norm of ours (stock's are equal)")
    for column in ("loss type", "reduction", *(f"micro-batches of {count}" for count in size or SIZES)):
        table.add_column(column)
    for name in loss_type or REDUCTIONS:
        cells = [f"{e['ours']['loss']:.4f}, {e['ours']['grad_norm']:.4f}" for e in entries if e["loss_type"] == name]
        table.add_row(name, REDUCTIONS[name], *cells)
    Console(width=200).print(table)
    raise typer.Exit(0 if all(entry["right"] for entry in entries) else 1)


if __name__ == "__main__":
    typer.run(main)
