"""
Shows for which widths of the batch stock TRL turns a finite loss into NaN gradients. Prompts are padded on the left, so
the first queries of a row may have no key to attend to. At some widths the backward of cuDNN's attention, one of SDPA's
backends, returns NaN for them. SDPA's other backends and the layouts of this package are compared.

    python benchmarks/nan_gradients.py --json benchmarks/results/nan-gradients-h200.json
    python benchmarks/nan_gradients.py --device cpu
"""

import json
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import environment
from _trainers import SHAPES, SharedModel, make_model, norm, not_finite
from records import write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trl_fused_grpo.parity.tiny import FIRST_WORD_ID, PAD_ID


PROMPT, LEFT_PADDING = 256, (21, 41, 0, 97)
# 2880 and its neighbours, and multiples of 64 as `pad_to_multiple_of=64` gives
NEIGHBOURS = [2848, 2872, 2876, 2878, 2879, 2880, 2881, 2882, 2884, 2888, 2896, 2912]
WIDTHS = {"cuda": [512, 1024, 1984, 2048, 2752, 2816, *NEIGHBOURS, 2944, 3008, 3072, 4096, 4352], "cpu": [300, 320]}
# The backends of SDPA that stock may use, and the layouts of ours
STOCK = {"stock": None, "stock, efficient": SDPBackend.EFFICIENT_ATTENTION, "stock, math": SDPBackend.MATH}
LAYOUTS = ("packed", "padded")
# Far more than the rounding error of bfloat16 here
NORM_RTOL = 2e-2

app = typer.Typer(add_completion=False)
console = Console(width=150)


def micro_batch(width: int, vocab: int, device: str) -> dict[str, Tensor]:
    """Prompts padded on the left, and completions that fill the rest of `width` columns."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_WORD_ID, vocab, (len(LEFT_PADDING), width), generator=generator)
    mask = torch.arange(width) >= torch.tensor(LEFT_PADDING).unsqueeze(1)
    ids, mask = torch.where(mask, ids, PAD_ID).to(device), mask.long().to(device)
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": mask[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "advantages": torch.tensor([1.1, -0.7, 0.6, -0.4], device=device),
        "num_items_in_batch": mask[:, PROMPT:].sum(),
    }


def step(shared: SharedModel, trainer: Any, inputs: dict[str, Tensor], backend: SDPBackend | None) -> dict[str, Any]:
    """Loss of one micro-batch, how many gradients are not finite, and their norm."""
    shared.drop_gradients()
    with shared.running(trainer), nullcontext() if backend is None else sdpa_kernel(backend):
        loss = trainer.compute_loss(trainer.model_wrapped, dict(inputs))
        trainer.accelerator.backward(loss)
    gradients = shared.gradients()
    return {
        "loss": loss.item(),
        "not_finite": (bad := not_finite(gradients)),
        "tensors": len(gradients),
        "grad_norm": None if bad else norm(gradients),
    }


def run(width: int, shared: SharedModel, trainers: dict[str, Any], vocab: int, device: str) -> list[dict]:
    """All trainers on one width."""
    inputs = micro_batch(width, vocab, device)
    records: list[dict[str, Any]] = []
    for name, trainer in trainers.items():
        records.append({"width": width, "name": name, **step(shared, trainer, inputs, STOCK.get(name))})
    expected = next(record["grad_norm"] for record in records if record["name"] == "stock, math")
    for record in records:
        if record["grad_norm"] is not None and expected is not None:
            record["norm_difference"] = abs(record["grad_norm"] - expected) / expected
        record["right"] = record.get("norm_difference", math.inf) <= NORM_RTOL
    return records


def print_records(records: list[dict], names: list[str]) -> None:
    """One row per width."""
    table = Table(title="gradients: distance of the norm from that of SDPA's math backend, or how many hold a NaN")
    table.add_column("width", justify="right")
    table.add_column("divides by", justify="right")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for width in dict.fromkeys(record["width"] for record in records):
        cells = []
        for record in (r for r in records if r["width"] == width):
            cell = f"NaN in {record['not_finite']} of {record['tensors']}"
            if not record["not_finite"]:
                cell = f"{record['norm_difference']:.1e}"
            cells.append(("" if record["right"] else "[red]") + cell)
        table.add_row(str(width), str(width & -width), *cells)
    console.print(table)


@app.command()
def main(
    width: Annotated[list[int] | None, typer.Option(help="columns of the batch, over 256; repeatable")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes, else the last line")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Try every width; exits 1 when ours has a gradient that is not finite or not stock's."""
    warnings.simplefilter("ignore", FutureWarning)
    shape, dtype = ("thin", torch.bfloat16) if device == "cuda" else ("tiny", torch.float32)
    rows, vocab = len(LEFT_PADDING), SHAPES[shape][-1]
    shared = SharedModel(
        make_model(shape, device, dtype), rows, lambda completions, **_: [0.0] * len(completions), rows
    )
    stock = shared.build(False, rows)
    kinds = [name for name in STOCK if device == "cuda" or name != "stock, efficient"]
    trainers = dict.fromkeys(kinds, stock)
    trainers |= {f"ours, {layout}": shared.build(True, rows, fused_layout=layout) for layout in LAYOUTS}

    record: dict[str, Any] = {
        **environment(device, commit),
        "left_padding": LEFT_PADDING,
        "prompt": PROMPT,
        "results": [],
    }
    for columns in width or WIDTHS[device]:
        record["results"] += run(columns, shared, trainers, vocab, device)
    print_records(record["results"], list(trainers))
    if json_path is None:
        print(json.dumps(record))
    else:
        write_record(json_path, record)
    if not all(entry["right"] for entry in record["results"] if entry["name"].startswith("ours")):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
