"""
Is a larger distance from float32 rounding, or a fault? Gradients of one optimizer step under bf16 autocast: stock
GRPOTrainer, stock with another attention (the null: nobody would call that a fault) and FusedGRPOTrainer, each against
stock in float32, on the same weights and completions, over many seeds. The learning rate is zero. With `--drawn` a case
that `python -m tests.harness --random` has drawn, in bfloat16 against float64, as that judges it.

    python benchmarks/rounding.py --seeds 24 --json rounding.json             # on CUDA: --model 0.6b
    python benchmarks/rounding.py --mode sequence_mask --longest 4096
    python benchmarks/rounding.py --drawn random:3402:702 --drawn random:3403:472 --seeds 256
    python benchmarks/rounding.py --drawn random:3402:702 --seeds 512 --after 256  # not those that singled it out
"""

import importlib
import math
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import environment
from _rollout import Lengths, Rollout
from _step_cases import Case
from _trainers import SHAPES, clear_memory, distance, norm
from records import write_record
from rich.console import Console
from rich.table import Table
from step import make_trainer
from transformers import TrainerCallback

from trl_fused_grpo.parity import Settings
from trl_fused_grpo.parity.judge import measure
from trl_fused_grpo.parity.run_case import Outcome, Restarted
from trl_fused_grpo.parity.trainers import load_weights, noisy_weights


# The attention and the options of each contender; `None` is torch's own
ARMS: dict[str, tuple[bool, str | None, dict[str, Any]]] = {
    "stock": (False, None, {}),
    "stock, eager attention": (False, "eager", {}),
    "ours": (True, None, {}),
    "ours, padded": (True, None, {"fused_layout": "padded"}),
}
SHARPER = 6.0  # random embeddings this many times larger give log-probs that vary as a trained model's do
MODES = ("sequence_mask", "token_truncate")


class Gradients(TrainerCallback):
    """Keeps the gradients that an optimizer step is about to take, before they are clipped."""

    def __init__(self) -> None:
        self.model: Any = None
        self.kept: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called once the gradients of a window are there."""
        self.kept = [p.grad.detach().float().cpu() for p in self.model.parameters() if p.grad is not None]


def one_step(
    case: Case, fused: bool, attention: str | None, rollout: Rollout, device: str, extra: dict
) -> list[torch.Tensor]:
    """The gradients of one step, outside the device."""
    trainer = sharper_trainer(case, fused, rollout, device, {"max_grad_norm": 0.0, **extra})
    if attention is not None:
        trainer.model.set_attn_implementation(attention)
    gradients = Gradients()
    gradients.model = trainer.model
    trainer.add_callback(gradients)
    trainer.train()
    return gradients.kept


def sharper_trainer(case: Case, fused: bool, rollout: Rollout, device: str, options: dict[str, Any]) -> Any:
    """A trainer of `step.py` whose model has sharper predictions."""
    case = replace(case, options={**case.options, **options})
    trainer = make_trainer(case, fused, rollout, device, 1, {})
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.mul_(SHARPER)
    return trainer


def errors_of_seed(case: Case, seed: int, device: str) -> dict[str, float]:
    """The distance of each contender's gradients from float32, relative to their norm."""
    rollout = Rollout.make(case.lengths, 2, 8, SHAPES[case.model][-1], seed)
    sampler = sharper_trainer(case, False, rollout, device, {"bf16": False})
    rollout.add_sampler_logps(sampler, seed)
    del sampler
    truth = one_step(case, False, None, rollout, device, {"bf16": False})
    errors = {"norm": norm(truth)}
    for name, (fused, attention, extra) in ARMS.items():
        errors[name] = distance(one_step(case, fused, attention, rollout, device, {"bf16": True, **extra}), truth)
        clear_memory()
    return errors


def errors_of_mode(mode: str, model: str, lengths: Lengths, seeds: int, device: str) -> list[dict[str, float]]:
    """[`errors_of_seed`] of each seed, under a mode of vLLM's correction."""
    options = {"vllm_importance_sampling_mode": mode, "gradient_accumulation_steps": 4}
    case, rows = Case(model, lengths=lengths, options=options), []
    for seed in range(seeds):
        rows.append(errors_of_seed(case, seed, device))
        print(mode, seed, {key: f"{value:.3g}" for key, value in rows[-1].items()}, flush=True)
    return rows


def errors_of_drawn(
    name: str, batches: int, after: int, device: str
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """
    The distance of each contender's gradients from float64, relative to their norm: of each batch of a drawn case
    `after` its first ones, and of all together, where the batches with the largest gradients decide.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    random_cases, steps = (importlib.import_module(f"tests.harness.{part}") for part in ("random_cases", "steps"))
    drawn = random_cases.random_case(name)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(Path(folder), device, torch.bfloat16)
        start = noisy_weights(steps.stock_trainer(drawn, settings), drawn.noise)
        truth, arms = Restarted(steps.float64_trainer(drawn, settings), start), {}
        for arm, (fused, attention, extra) in ARMS.items():
            case = replace(drawn, fused={**drawn.fused, **extra})
            trainer = (steps.fused_trainer if fused else steps.stock_trainer)(case, settings)
            if attention is not None:
                trainer.model.set_attn_implementation(attention)
            arms[arm] = Restarted(load_weights(trainer, start), start)
        expected: list[Outcome] = []
        outcomes: dict[str, list[Outcome]] = {arm: [] for arm in arms}
        for seed in range(drawn.seed + after, drawn.seed + after + batches):
            data = steps.make_data(drawn, truth(), seed)
            expected.append(steps.run_steps(truth(), drawn, data, settings.dtype))
            for arm, trainer in arms.items():
                outcomes[arm].append(steps.run_steps(trainer(), drawn, data, settings.dtype))
    of_each = zip(expected, *outcomes.values(), strict=True)
    rows = [
        {arm: measure([first], [one]).gradient for arm, one in zip(arms, ones, strict=True)} for first, *ones in of_each
    ]
    together = {arm: measure(expected, of_arm).gradient for arm, of_arm in outcomes.items()}
    return [row for row in rows if all(0 < error < math.inf for error in row.values())], together


def interval(logarithms: list[float]) -> tuple[float, float]:
    """The middle 95% of the mean under resampling."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(logarithms, k=len(logarithms))) for _ in range(4000))
    return means[100], means[-101]


def against_stock(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each contender the error relative to stock's: the geometric mean over seeds with its 95% interval."""
    verdict = {}
    for name in list(ARMS)[1:]:
        logarithms = [math.log(row[name] / row["stock"]) for row in rows]
        low, high = interval(logarithms)
        mean = math.exp(statistics.fmean(logarithms))
        verdict[name] = {"ratio": mean, "low": math.exp(low), "high": math.exp(high)}
    return verdict


def main(
    mode: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODES)}; repeatable")] = None,
    drawn: Annotated[list[str] | None, typer.Option(help="random:SEED:INDEX instead; repeatable")] = None,
    seeds: Annotated[int, typer.Option(help="generation batches", min=2)] = 24,
    after: Annotated[int, typer.Option(help="of a drawn case, so many batches are left out before", min=0)] = 0,
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "small",
    median: Annotated[int, typer.Option(help="tokens of completions")] = 120,
    longest: Annotated[int, typer.Option(help="the same, at most")] = 512,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare errors; exits 1 where ours is larger than stock's and the null's, beyond what the seeds leave open."""
    lengths = Lengths(prompts=(20, 60), median=median, longest=longest)
    record: dict[str, Any] = {**environment(device, commit), "results": []}
    record |= {"seeds": seeds, "after": after}
    if not drawn:
        record |= {"model": model, "median": median, "longest": longest}
    truth = "float64" if drawn else "float32"
    table = Table(title=f"Distance of gradients from {truth}, relative to stock's")
    for column in ("mode", "contender", "median error", "relative to stock", "95%", "batches together"):
        table.add_column(column)
    is_larger = False
    for name in drawn or mode or MODES:
        together = {}
        if drawn:
            rows, together = errors_of_drawn(name, seeds, after, device)
        else:
            rows = errors_of_mode(name, model, lengths, seeds, device)
        verdict = against_stock(rows)
        result = {"mode": name, "relative_to_stock": verdict, **({"together": together} if together else {})}
        record["results"].append({**result, "seeds": rows})
        for contender in ARMS:
            cells = verdict.get(contender)
            shown = ("", "") if cells is None else (f"{cells['ratio']:.3f}", f"{cells['low']:.3f}-{cells['high']:.3f}")
            median_error = statistics.median(row[contender] for row in rows)
            table.add_row(name, contender, f"{median_error:.3g}", *shown, f"{together.get(contender, math.nan):.3g}")
        is_larger |= verdict["ours"]["low"] > max(1.0, verdict["stock, eager attention"]["high"])
        if json_path is not None:
            write_record(json_path, record)
    Console(width=120).print(table)
    raise typer.Exit(int(is_larger))


if __name__ == "__main__":
    typer.run(main)
