"""
A recipe of `examples/` on a tiny model and data made here: does it train some steps, with numbers that are finite?

    python benchmarks/_recipes.py text --device cuda
"""

import importlib
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


STEPS = 20


def _small() -> Any:
    """What the tests of the recipes make their models and data with."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module("tests.examples.small")


def _text(folder: Path) -> dict[str, Any]:
    return {"model": _small().save_model(folder / "model"), "dataset": _small().save_problems(folder / "problems")}


def _images(folder: Path) -> dict[str, Any]:
    return {"model": _small().save_model_with_images(folder / "model"), "images": 64}


def _tools(folder: Path) -> dict[str, Any]:
    return {"model": _small().save_model(folder / "model"), "products": 64, "max_completion_length": 64}


# The script, and what it trains on
RECIPES: dict[str, tuple[str, Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "text": ("train_text", _text, {}),
    "text-lora": ("train_text", _text, {"lora": "true"}),
    "tools": ("train_tools", _tools, {}),
    "images": ("train_images", _images, {"lora": "false"}),
    "images-lora": ("train_images", _images, {"lora": "true"}),
}


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(RECIPES)}")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Train, and exit with 1 where a loss or a gradient norm is not finite."""
    script, make, options = RECIPES[name]
    small = _small()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        on_device = {"use_cpu": "true"} if device == "cpu" else {"bf16": "true"}
        words = small.arguments(folder, **{**make(folder), **options, **on_device, "max_steps": STEPS})
        trainer = small.load(script).main(words)
    logs = small.logs_of(trainer)
    finite = [entry for entry in logs if math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"])]
    moved = any(entry["grad_norm"] > 0 for entry in logs)
    typer.echo(f"{len(finite)} finite of {len(logs)} steps, layout {trainer.fused_layout()}")
    raise typer.Exit(
        not (len(finite) == len(logs) == STEPS and (moved or name == "tools"))
    )  # a random model uses no tool


if __name__ == "__main__":
    typer.run(main)
