"""
Does FusedGRPOTrainer learn what stock GRPOTrainer learns? The arithmetic task of the examples, trained by both from the
same starts, over many seeds: each step may look right while a bias of its rounding lowers entropy over dozens of them.

    python benchmarks/learning.py --jobs 12 --json learning.json
    python benchmarks/learning.py --device cpu --seeds 2 --steps 20 --jobs 1

A seed is a model of its own, pre-trained on the sums of a careless pupil, and an order of the data. Three arms train it
with bf16 autocast over float32 weights, and sample for themselves: stock, ours with its defaults, and the null, stock
with another attention (eager), which nobody would call another training. A fourth, `--arm "ours, in chunks"`, has a
head of many chunks of logits, as large vocabularies do. Steps are two micro-batches; each generation serves two steps,
so that the second has ratios other than 1, and KL from the start counts.

Arms begin with the same samples and soon draw others, so that a pair differs as two trainings of one start do. What was
chosen before anything was measured on CUDA:

- The measure is accuracy on 3000 sums that were never trained on, decoded greedily, in the mean of the last three
  evaluations, 20 steps apart: less of it is chance than of one evaluation.
- Equivalence: two one-sided paired t tests at 0.05, with a margin of one point of accuracy. With 24 seeds they have a
  power of 0.9 if the paired differences have a mean of 0 and a standard deviation of 0.0144 (16 seeds: 0.0115).
- Entropy, KL, gradient norm and clipped ratios at the end are the mean of the last 20 steps, with paired differences
  and their intervals, without a test.

Exits 1 where accuracy of ours is not shown to be that of stock, or stock has learnt too little to tell.
"""

import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _arithmetic import ARMS, Setting, Start, Workers, curve, rounded
from _equivalence import equivalence, mean_interval
from _measure import environment
from records import write_record
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback


CURVES = {
    "reward": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "clipped": "clip_ratio/region_mean",
}
STEPS_OF_A_POINT = 10  # of the curves: each is a mean, so that the record stays short
STEPS_BETWEEN_EVALUATIONS = 20
LAST_EVALUATIONS = 3  # whose mean is the final accuracy
LAST_POINTS = 2  # of the curves, whose mean is the final value
MAIN_ARMS = ("stock", "null", "ours")
CLEAR_RISE = 0.1  # of accuracy
MARGIN = 0.01  # of accuracy: one point


class Evaluations(TrainerCallback):
    """Measures accuracy on held-out sums now and then."""

    def __init__(self, start: Start):
        self.start = start
        self.found: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        if state.global_step % STEPS_BETWEEN_EVALUATIONS == 0 or state.global_step == args.max_steps:
            self.found.append(rounded(self.start.accuracy_of(kwargs["model"])))


def pretrain(seed: int, setting: Setting, device: str, folder: Path) -> tuple[int, float]:
    """Make the start of a seed; the seed and the accuracy of its start."""
    return seed, rounded(Start(seed, setting, device, folder).pretrain())


def train(seed: int, arm: str, setting: Setting, device: str, folder: Path) -> dict[str, Any]:
    """Train an arm from the start of a seed; its curves."""
    begin = time.perf_counter()
    start = Start(seed, setting, device, folder)
    trainer, evaluations = start.trainer(ARMS[arm]), Evaluations(start)
    trainer.add_callback(evaluations)
    trainer.train()
    logs = trainer.state.log_history
    entry: dict[str, Any] = {"seed": seed, "arm": arm, "seconds": rounded(time.perf_counter() - begin)}
    entry |= {"accuracy": evaluations.found}
    entry |= {key: curve(logs, logged, STEPS_OF_A_POINT) for key, logged in CURVES.items()}
    if ARMS[arm].fused:
        [recomputed] = curve(logs, "fused/rows_recomputed", setting.steps)
        entry |= {"layout": trainer.fused_layout(), "recomputed": recomputed}
    return entry


def final(entry: dict[str, Any], key: str) -> float:
    """The value of a training that counts: of its last evaluations or steps."""
    return statistics.fmean(entry[key][-(LAST_EVALUATIONS if key == "accuracy" else LAST_POINTS) :])


def by_seed(results: list[dict[str, Any]], key: str) -> dict[str, dict[int, float]]:
    """Of each arm the final value of each seed."""
    values: dict[str, dict[int, float]] = {}
    for entry in results:
        values.setdefault(entry["arm"], {})[entry["seed"]] = final(entry, key)
    return values


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm and value: mean with its 95% interval, and paired differences from stock with theirs at 90%."""
    lines = []
    for key in ("accuracy", *CURVES):
        values = by_seed(results, key)
        for arm, of_arm in values.items():
            mean, low, high = mean_interval(list(of_arm.values()))
            line = {"value": key, "arm": arm, "mean": mean, "low": low, "high": high}
            if arm != "stock":
                pairs = [of_arm[seed] - values["stock"][seed] for seed in of_arm]
                paired = equivalence(pairs, MARGIN)
                line |= {"difference": paired.mean, "sd": paired.sd, "from": paired.low, "to": paired.high}
                if key == "accuracy":
                    line |= {"p": paired.p, "equivalent": paired.equivalent}
            lines.append({name: rounded(x) if type(x) is float else x for name, x in line.items()})
    return lines


def complete(results: list[dict[str, Any]], arms: list[str]) -> list[dict[str, Any]]:
    """The entries of the seeds that every arm has trained on."""
    counts = Counter(entry["seed"] for entry in results)
    return [entry for entry in results if counts[entry["seed"]] == len(arms)]


def make_record(results: list[dict[str, Any]], setting: Setting, **more: Any) -> dict[str, Any]:
    """Comparison and curves, of seeds in order."""
    results = sorted(results, key=lambda entry: (entry["seed"], list(ARMS).index(entry["arm"])))
    comparison = compare(results) if len({entry["seed"] for entry in results}) > 1 else []
    points = {"steps_of_a_point": STEPS_OF_A_POINT, "evaluated_every": STEPS_BETWEEN_EVALUATIONS}
    more |= {"setting": asdict(setting), **points, "margin": MARGIN}
    return {**more, "comparison": comparison, "results": results}


def rows_of_table(record: dict[str, Any]) -> list[list[str]]:
    """A row for each arm: accuracy, its difference from stock's, the equivalence test, and the same of entropy."""
    lines = {(line["value"], line["arm"]): line for line in record["comparison"]}
    rows = []
    for arm in dict.fromkeys(line["arm"] for line in record["comparison"]):
        row = [arm]
        for key in ("accuracy", "entropy"):
            line = lines[key, arm]
            row.append(f"{line['mean']:.4f}")
            row.append(
                "" if arm == "stock" else f"{line['difference']:+.4f} ({line['from']:+.4f} to {line['to']:+.4f})"
            )
            if key == "accuracy":
                row.append("" if arm == "stock" else f"{line['p']:.1e}")
        rows.append([*row, f"{lines['kl', arm]['mean']:.4f}", f"{lines['grad_norm', arm]['mean']:.3f}"])
    return rows


COLUMNS = ("arm", "accuracy", "minus stock's", "p", "entropy, nats", "minus stock's", "KL", "gradient norm")


def main(
    seeds: Annotated[int, typer.Option(help="pairs", min=1)] = 24,
    steps: Annotated[int, typer.Option(help="optimizer steps of a training", min=1)] = Setting.steps,
    pretrain_steps: Annotated[int, typer.Option(help="supervised steps before", min=1)] = Setting.pretrain_steps,
    held_out: Annotated[int, typer.Option(help="sums that accuracy is measured on", min=1)] = Setting.held_out,
    arm: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ARMS)}; repeatable, and stock comes besides")
    ] = None,
    jobs: Annotated[int, typer.Option(help="processes that share the device", min=1)] = 1,
    limit: Annotated[float, typer.Option(help="seconds after which no seed begins that would end later")] = 3600,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Train all arms over all seeds; exits 1 where accuracy of ours is not shown to be that of stock."""
    setting = Setting(steps=steps, pretrain_steps=pretrain_steps, held_out=held_out)
    arms = list(dict.fromkeys(("stock", *(arm or MAIN_ARMS))))
    begin, results, done = time.time(), [], []
    record: dict[str, Any] = {"comparison": []}
    about = {**environment(device, commit), "jobs": jobs, "seeds_asked_for": seeds}
    workers = Workers(jobs, limit)
    with tempfile.TemporaryDirectory() as name:
        common = (setting, device, Path(name))
        starts = dict(workers.each(pretrain, [(seed, *common) for seed in range(seeds)]))
        print(f"{time.time() - begin:6.0f} s: {len(starts)} starts", flush=True)
        for entry in workers.each(train, [(seed, arm, *common) for seed in sorted(starts) for arm in arms]):
            results.append(entry | {"at_start": starts[entry["seed"]]})
            seconds = rounded(time.time() - begin)
            print(f"{seconds:6.0f} s, seed {entry['seed']}, {entry['arm']}: {final(entry, 'accuracy'):.4f}", flush=True)
            done = complete(results, arms)
            if done:
                record = make_record(done, setting, **about, seconds=seconds, failures=workers.failures)
                if json_path is not None:
                    write_record(json_path, record)
        workers.close()
    show(record, len(done) // len(arms))
    verdicts = [line["equivalent"] for line in record["comparison"] if "p" in line and line["arm"] != "null"]
    is_shown = bool(verdicts) and all(verdicts) and has_learnt(done)
    raise typer.Exit(int(workers.failures > 0 or not is_shown))


def has_learnt(results: list[dict[str, Any]]) -> bool:
    """Whether stock's accuracy rose clearly: arms that learn nothing are the same."""
    rises = [final(entry, "accuracy") - entry["at_start"] for entry in results if entry["arm"] == "stock"]
    return statistics.fmean(rises) > CLEAR_RISE


def show(record: dict[str, Any], seeds: int) -> None:
    """Print the table."""
    table = Table(*COLUMNS, title=f"{seeds} seeds, differences with 90% intervals")
    for row in rows_of_table(record):
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
