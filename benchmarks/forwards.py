"""
What goes through the model in an optimizer step: forwards with gradient and without, and their tokens, padding
included. Stock GRPOTrainer, FusedGRPOTrainer, and the latter with parts of it switched off, on the same completions,
vLLM's importance ratios corrected. Nothing is computed again in backward here (no gradient checkpointing).

    python benchmarks/forwards.py --json forwards.json
"""

import warnings
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _instruments import hide_instruments
from _measure import environment
from _step_cases import CASES
from micro_batches import make_rollout
from records import write_record
from rich.console import Console
from rich.table import Table
from step import make_trainer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from typing_extensions import Self

from trl_fused_grpo._compat.libraries import LIBRARIES


ARMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "stock": (False, {}),
    "ours": (True, {}),
    "ours, fused_skip_old_logps=False": (True, {"fused_skip_old_logps": False}),
    "ours, fused_share_prompts=False": (True, {"fused_share_prompts": False}),
    "ours, fused_max_tokens_per_forward=0": (True, {"fused_max_tokens_per_forward": 0}),
    'ours, fused_layout="padded"': (True, {"fused_layout": "padded"}),
}


class Counter:
    """Counts the forwards of a trainer's model by those of its first layer, but for the check of a first step."""

    def __init__(self, trainer: Any):
        if hasattr(trainer, "_fused"):
            trainer._fused.check.compare_logps = lambda *_: None
        self.first, self.calls, self.tokens = trainer.model.model.layers[0], [0, 0], [0, 0]  # without gradient, with

    def __enter__(self) -> Self:
        self.original = forward = Qwen3DecoderLayer.forward

        @wraps(forward)
        def counted(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if layer is self.first:
                self.calls[torch.is_grad_enabled()] += 1
                self.tokens[torch.is_grad_enabled()] += hidden_states.shape[0] * hidden_states.shape[1]
            return forward(layer, hidden_states, *args, **kwargs)

        Qwen3DecoderLayer.forward = counted
        return self

    def __exit__(self, *exc_info: object) -> None:
        Qwen3DecoderLayer.forward = self.original


def main(json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None) -> None:
    """Count the second of two steps."""
    warnings.simplefilter("ignore")
    hide_instruments()
    LIBRARIES.add(__name__)  # what counts the layer's forwards changes nothing
    rollout, entries = make_rollout(), []
    table = Table(title=f"One optimizer step of {len(rollout.completions)} completions, {rollout.tokens} tokens")
    for column in ("", "forwards without gradient", "tokens", "forwards with gradient", "tokens"):
        table.add_column(column, justify="right" if column else "left")
    for name, (fused, options) in ARMS.items():
        case = replace(CASES["tiny"], options={"gradient_checkpointing": False, **options})
        trainer = make_trainer(case, fused, rollout, "cpu", 1, {})
        trainer.train()  # TRL begins the next with a new generation batch
        with Counter(trainer) as counter:
            trainer.train()
        entry = {"name": name, "forwards": counter.calls, "tokens": counter.tokens}
        entries.append(entry)
        cells = [number for pair in zip(counter.calls, counter.tokens, strict=True) for number in pair]
        table.add_row(name, *map(str, cells))
    if json_path is not None:
        write_record(json_path, {**environment("cpu", None), "tokens": rollout.tokens, "results": entries})
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
