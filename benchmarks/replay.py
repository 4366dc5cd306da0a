"""
Does FusedGRPOTrainer take the weights where stock GRPOTrainer takes them? A stock training is recorded: the tokens of
each of its generation batches. Then every arm trains on these tokens, from the same start, so that what it samples does
not depend on its weights; its weights drift from stock's by rounding alone, bf16 autocast over float32 weights.

    python benchmarks/replay.py --jobs 8 --json replay.json
    python benchmarks/replay.py --device cpu --seeds 2 --steps 10 --jobs 1

The drift of an arm is the distance of its weights from stock's, relative to the distance that stock's have gone from
the start. The null, stock with another attention, drifts as far as nobody would mind.

The criterion, chosen before anything was measured on CUDA: ours drifts no further than the null if at every checkpoint
the geometric mean over the seeds, of its drift relative to the null's, lies below 1.25 with its whole 95% interval.
Exits 1 where it does not, or nothing drifts. Entropy and accuracy at the end are recorded too, with paired differences
from stock's: a rounding with a bias would lower entropy on the same tokens.
"""

import math
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _arithmetic import ARMS, Setting, Start, Workers, curve, rounded
from _equivalence import mean_interval
from _measure import environment
from _trainers import distance, norm
from records import write_record
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback


LARGEST_RATIO = 1.25
LAST_STEPS = 20  # whose mean is the entropy at the end
TINY = 1e-12  # in place of 0, where weights are the same to the bit


Batch = tuple[torch.Tensor, torch.Tensor]  # input ids [B, P], and with completions [B, P + T]


def record_batches(model: Any) -> list[Batch]:
    """
    From here on every batch that the model generates goes to the list as well. Sampling takes random numbers, playing
    does not, and TRL draws the order of the sequences afterwards: both therefore seed again after each batch.
    """
    generate, batches = model.generate, []

    def recorded(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output = generate(input_ids=input_ids, **kwargs)
        batches.append((input_ids.cpu(), output.cpu()))
        torch.manual_seed(len(batches))
        return output

    model.generate = recorded
    return batches


def play_batches(model: Any, batches: list[Batch]) -> None:
    """
    From here on the model generates what was recorded.

    Raises:
        `RuntimeError`: later, when it is asked with other prompts.
    """
    left = enumerate(batches, 1)

    def played(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        number, (prompts, output) = next(left)
        if not torch.equal(prompts, input_ids.cpu()):
            raise RuntimeError("the prompts are not those of the recorded training")
        torch.manual_seed(number)
        return output.to(input_ids.device)

    model.generate = played


class Checkpoints(TrainerCallback):
    """Keeps the weights of every so many steps, outside the device."""

    def __init__(self, every: int):
        self.every = every
        self.kept: dict[int, list[torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        if state.global_step % self.every == 0:
            self.kept[state.global_step] = weights(kwargs["model"])


def weights(model: Any) -> list[torch.Tensor]:
    """A copy of all weights, outside the device."""
    return [parameter.detach().float().cpu().clone() for parameter in model.parameters()]


def record_stock(seed: int, setting: Setting, every: int, device: str, folder: Path) -> dict[str, Any]:
    """Make the start of a seed, train stock from it, and keep tokens and weights in the folder."""
    start = Start(seed, setting, device, folder)
    start.pretrain()
    trainer = start.trainer(ARMS["stock"])
    origin, batches = weights(trainer.model), record_batches(trainer.model)
    entry, kept = run(trainer, start, "stock", every)
    torch.save({"origin": origin, "batches": batches, "weights": kept}, start.folder / "recorded.pt")
    return entry


def replay(seed: int, arm: str, setting: Setting, every: int, device: str, folder: Path) -> dict[str, Any]:
    """Train an arm on the tokens recorded of a seed; its drift from stock."""
    start = Start(seed, setting, device, folder)
    recorded = torch.load(start.folder / "recorded.pt")
    trainer = start.trainer(ARMS[arm])
    if distance(weights(trainer.model), recorded["origin"]) != 0:
        raise RuntimeError("the start is not that of the recorded training")
    play_batches(trainer.model, recorded["batches"])
    entry, kept = run(trainer, start, arm, every)
    stock = recorded["weights"]
    return entry | {"drift": {step: rounded(drift(kept[step], stock[step], recorded["origin"])) for step in stock}}


def run(trainer: Any, start: Start, arm: str, every: int) -> tuple[dict[str, Any], dict[int, list[torch.Tensor]]]:
    """Train; what is logged at the end, and the weights of each checkpoint."""
    begin, checkpoints = time.perf_counter(), Checkpoints(every)
    trainer.add_callback(checkpoints)
    trainer.train()
    del trainer.model.generate  # what is recorded or played
    entry = {"seed": start.seed, "arm": arm, "seconds": rounded(time.perf_counter() - begin)}
    entry["accuracy"] = rounded(start.accuracy_of(trainer.model))
    entry["entropy"] = curve(trainer.state.log_history, "entropy", LAST_STEPS)[-1]
    if ARMS[arm].fused:
        entry["layout"] = trainer.fused_layout()
    return entry, checkpoints.kept


def drift(mine: list[torch.Tensor], stock: list[torch.Tensor], start: list[torch.Tensor]) -> float:
    """Distance from stock's weights relative to the distance of stock's from the start."""
    gone = norm([a - b for a, b in zip(stock, start, strict=True)])
    return distance(mine, stock) * norm(stock) / max(gone, TINY)


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each checkpoint: the arms' geometric mean drift, and each relative to the null's with its 95% interval."""
    lines = []
    found = {(entry["arm"], entry["seed"]): entry["drift"] for entry in results if "drift" in entry}
    seeds = sorted({seed for _, seed in found})
    for step in next(iter(found.values())):
        null = [max(found["null", seed][step], TINY) for seed in seeds]
        for arm in dict.fromkeys(arm for arm, _ in found):
            drifts = [max(found[arm, seed][step], TINY) for seed in seeds]
            line = {"step": step, "arm": arm, "drift": math.exp(sum(map(math.log, drifts)) / len(seeds))}
            if arm != "null" and len(seeds) > 1:
                ratios = [math.log(mine / its) for mine, its in zip(drifts, null, strict=True)]
                names = ("ratio", "low", "high")
                line |= {name: math.exp(x) for name, x in zip(names, mean_interval(ratios), strict=True)}
            lines.append({name: rounded(x) if type(x) is float else x for name, x in line.items()})
    return lines


def compare_ends(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entropy and accuracy at the end: paired differences of each arm from stock's, with their 95% intervals."""
    lines = []
    seeds = sorted({entry["seed"] for entry in results})
    for value in ("entropy", "accuracy"):
        found = {(entry["arm"], entry["seed"]): entry[value] for entry in results}
        stock = sum(found["stock", seed] for seed in seeds) / len(seeds)
        for arm in dict.fromkeys(arm for arm, _ in found if arm != "stock"):
            pairs = [found[arm, seed] - found["stock", seed] for seed in seeds]
            of_pairs = dict(zip(("difference", "low", "high"), map(rounded, mean_interval(pairs)), strict=True))
            lines.append({"value": value, "arm": arm, "stock": rounded(stock), **of_pairs})
    return lines


def drifts_further(line: dict[str, Any]) -> bool:
    """Whether the drift of an arm of ours is not shown to be that of the null."""
    return line["arm"].startswith("ours") and not line.get("high", 0.0) <= LARGEST_RATIO


def rows_of_table(record: dict[str, Any]) -> list[list[str]]:
    """A row for each checkpoint: drift of the null, then of each other arm with its ratio to the null's."""
    rows: dict[int, list[str]] = {}
    for line in record["comparison"]:
        cell = f"{line['drift']:.4f}"
        if "ratio" in line:
            cell += f" ({line['ratio']:.2f}, {line['low']:.2f} to {line['high']:.2f})"
        rows.setdefault(line["step"], [str(line["step"])]).append(cell)
    return list(rows.values())


COLUMNS = ("step", *(arm for arm in ARMS if arm != "stock"))


def main(
    seeds: Annotated[int, typer.Option(help="recorded trainings", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="generation batches, each for one optimizer step", min=1)] = 300,
    every: Annotated[int, typer.Option(help="steps between checkpoints", min=1)] = 50,
    pretrain_steps: Annotated[int, typer.Option(help="supervised steps before", min=1)] = Setting.pretrain_steps,
    jobs: Annotated[int, typer.Option(help="processes that share the device", min=1)] = 1,
    limit: Annotated[float, typer.Option(help="seconds after which no seed begins that would end later")] = 3600,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare drifts; exits 1 where ours is larger than the null's."""
    setting = Setting(steps=steps, pretrain_steps=pretrain_steps, iterations=1)
    begin, results = time.time(), []
    record: dict[str, Any] = {**environment(device, commit), "jobs": jobs, "seeds_asked_for": seeds}
    record |= {"setting": asdict(setting), "comparison": []}
    workers = Workers(jobs, limit)
    with tempfile.TemporaryDirectory() as name:
        common = (setting, min(every, steps), device, Path(name))
        stock = {
            entry["seed"]: entry for entry in workers.each(record_stock, [(seed, *common) for seed in range(seeds)])
        }
        print(f"{time.time() - begin:6.0f} s: {len(stock)} trainings recorded", flush=True)
        arms = [arm for arm in ARMS if arm != "stock"]
        for entry in workers.each(replay, [(seed, arm, *common) for seed in sorted(stock) for arm in arms]):
            results.append(entry)
            seconds = rounded(time.time() - begin)
            print(f"{seconds:6.0f} s, seed {entry['seed']}, {entry['arm']}:", *entry["drift"].values(), flush=True)
            counts = Counter(entry["seed"] for entry in results)
            done = [entry for entry in results if counts[entry["seed"]] == len(arms)]
            done += [stock[seed] for seed in counts if counts[seed] == len(arms)]
            done.sort(key=lambda entry: (entry["seed"], list(ARMS).index(entry["arm"])))
            if done:
                record |= {
                    "seconds": seconds,
                    "failures": workers.failures,
                    "comparison": compare(done),
                    "results": done,
                }
                record |= {"ends": compare_ends(done)} if len(done) > 1 + len(arms) else {}
                if json_path is not None:
                    write_record(json_path, record)
        workers.close()
    table = Table(*COLUMNS, title="Drift from stock's weights; in brackets relative to the null's, with 95% intervals")
    for row in rows_of_table(record):
        table.add_row(*row)
    Console(width=160).print(table)
    for line in record.get("ends", ()):
        print("{value} at the end, stock {stock}: {arm} {difference:+} ({low:+} to {high:+})".format(**line))
    # Where nothing drifts at all, as where no completion earns a reward, nothing is shown
    is_telling = any(line["arm"] == "null" and line["drift"] > TINY for line in record["comparison"])
    is_further = any(map(drifts_further, record["comparison"]))
    raise typer.Exit(int(workers.failures > 0 or not is_telling or is_further))


if __name__ == "__main__":
    typer.run(main)
