"""
Everything that is checked on a GPU, one process after the other or several at a time, and one record of it: tests with
the marker `gpu`, parity and drawn cases in float32 and bfloat16, determinism, long trainings, the recipes of
`examples/`, and with two GPUs the engines.

    python benchmarks/gpu_matrix.py --jobs 6 --json benchmarks/results/gpu-matrix-h200.json
    python benchmarks/gpu_matrix.py --only parity --only fuzz --random 2000 --jobs 6 --json gpu-matrix.json
    python benchmarks/gpu_matrix.py --device cpu --only recipe --skip arithmetic

The record is written after each job. Where the file is there already, from the same device and versions, what other
jobs did stays in it, so that a matrix can be run in parts. Each job names its commit.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import environment
from _recipes import RECIPES
from records import write_record


ROOT = Path(__file__).parents[1]
TAIL = 1500  # characters of the output of a job that failed

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Job:
    """
    A process of the matrix.

    Args:
        name (`str`): what `--only` and `--skip` look into.
        command (`list[str]`): its words; `{json}` is the file of its own record.
        minutes (`float`): after which it is ended.
        gpus (`int`): how many it needs; 0 where it runs on a CPU as well.
        keeps_results (`bool`): whether the results in its own record go to the one of the matrix.
    """

    name: str
    command: list[str] = field(default_factory=list)
    minutes: float = 10
    gpus: int = 0
    keeps_results: bool = False


def jobs_of(device: str, random_cases: int, seed: int, soak_steps: int, processes: int) -> list[Job]:
    """All jobs, the cheap ones that tell most first."""
    python = [sys.executable]
    parity = [*python, "-m", "trl_fused_grpo", "parity", "--device", device, "--jobs", str(processes)]
    pytest = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), "-m", "gpu"]
    jobs = [Job(f"tests {path}", [*pytest, path], 10, 1) for path in files_with_gpu_tests()]
    for dtype in ("float32", "bfloat16"):
        of_dtype = ["--dtype", dtype, "--json", "{json}"]
        jobs.append(Job(f"parity {dtype}", [*parity, *of_dtype], 10))
        jobs.append(Job(f"parity models {dtype}", [*parity, "--models", *of_dtype], 15))
    harness = [*python, "-m", "tests.harness", "--device", device, "--jobs", str(processes)]
    jobs.append(Job("parity customised float32", [*harness, "--customised", "--json", "{json}"], 15))
    for dtype in ("float32", "bfloat16"):
        drawn = ["--random", str(random_cases), "--seed", str(seed), "--dtype", dtype, "--json", "{json}"]
        jobs.append(Job(f"fuzz {dtype}", [*harness, *drawn], 30))
    jobs += _trainings(device, soak_steps)
    jobs += [_recipe(name, device) for name in RECIPES]
    curve = ["--curve", "{json}.png"]
    jobs.append(Job("recipe arithmetic", [*python, "examples/train_arithmetic.py", *curve], 10))
    return jobs + _two_gpus(device)


def _trainings(device: str, soak_steps: int) -> list[Job]:
    scripts = [sys.executable, "benchmarks/determinism.py"], [sys.executable, "benchmarks/soak.py"]
    determinism, soak = ([*script, "--device", device, "--json", "{json}"] for script in scripts)
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    jobs = [Job(f"determinism {dtype}", [*determinism, "--dtype", dtype], 15, 0, True) for dtype in dtypes]
    soak += ["--steps", str(soak_steps)]
    jobs += [Job(f"soak {arm}", [*soak, "--arm", arm], 20, 0, True) for arm in ("default", "compile", "lora", "stock")]
    faults = ["--faults", "0.1", "--every", "5"]
    return [
        *jobs,
        *(Job(f"faults {arm}", [*soak, "--arm", arm, *faults], 20, 0, True) for arm in ("default", "lora")),
    ]


def _recipe(name: str, device: str) -> Job:
    return Job(f"recipe {name}", [sys.executable, "benchmarks/_recipes.py", name, "--device", device], 5)


def _two_gpus(device: str) -> list[Job]:
    """Under torchrun; on a CPU the processes are two as well."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    gpus = 2 if device == "cuda" else 0
    size = "0.6b" if device == "cuda" else "tiny"
    engines = ["benchmarks/engines.py", "--device", device, "--size", size, "--json", "{json}"]
    jobs = []
    for kinds in (("ddp", "zero"), ("fsdp",), ("qlora",)):  # one start for several
        cases = [f"--case={kind}" for kind in kinds]
        start, needed = ([sys.executable], min(gpus, 1)) if "qlora" in kinds else (launch, gpus)
        jobs.append(Job(f"engine {', '.join(kinds)}", [*start, *engines, *cases], 8, needed, True))
    step = [*launch, "benchmarks/step.py", "--device", device, "--case", "tiny-ddp"]
    return [*jobs, Job("two step tiny-ddp", step, 8, gpus)]


def files_with_gpu_tests() -> list[str]:
    """The test files with the marker, relative to the repository."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = re.compile(r"\bmark\.gpu\b|^from \S+ import .*\bgpu\b", re.MULTILINE)  # or the mark of another file
    return [str(path.relative_to(ROOT)) for path in files if marked.search(path.read_text(encoding="utf-8"))]


class Matrix:
    """
    Runs jobs, and notes what came of each. Of several GPUs a job sees as many as it needs, the least busy ones.

    Args:
        logs (`Path`): the folder of their outputs.
        threads (`int`): of torch, for each process.
        start (`dict`): of the record: the environment.
        names (`list[str]`): of all jobs that there are, so that the record says which have not run.
        path (`Path`, *optional*): where the record goes after each job.
    """

    def __init__(self, logs: Path, threads: int, start: dict[str, Any], names: list[str], path: Path | None = None):
        self.logs, self.threads, self.start, self.names, self.path = logs, threads, start, names, path
        self._results = {job["name"]: job for job in _earlier_jobs(path, start)}
        self._lock = threading.Lock()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(start.get("gpus", 0))))).split(",")
        self._jobs_on = dict.fromkeys(gpus, 0) if len(gpus) > 1 else {}

    @property
    def record(self) -> dict[str, Any]:
        """What the jobs did until now."""
        jobs = list(self._results.values())
        failed = [job["name"] for job in jobs if not job["right"]]
        not_run = [name for name in self.names if name not in self._results]
        return {**self.start, "not_run": not_run, "right": not failed, "failed": failed, "jobs": jobs}

    def run(self, job: Job) -> dict[str, Any]:
        """Run a job to its end, or until its time is over, and write the record."""
        result = self._ended(job)
        with self._lock:
            self._results[job.name] = result
            if self.path:
                write_record(self.path, self.record)
        return result

    @contextmanager
    def visible(self, job: Job) -> Generator[dict[str, str], None, None]:
        """The variable that names the GPUs of a job, which count as busy while it lasts."""
        with self._lock:
            taken = sorted(self._jobs_on, key=lambda gpu: self._jobs_on[gpu])[: max(1, job.gpus)]
            self._jobs_on.update({gpu: self._jobs_on[gpu] + 1 for gpu in taken})
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
        finally:
            with self._lock:
                self._jobs_on.update({gpu: self._jobs_on[gpu] - 1 for gpu in taken})

    def _ended(self, job: Job) -> dict[str, Any]:
        name = job.name.replace("/", "_").replace(" ", "-")
        record, log = self.logs / f"{name}.json", self.logs / f"{name}.log"
        command = [word.replace("{json}", str(record)) for word in job.command]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": str(self.threads)}
        start = time.perf_counter()
        with log.open("w") as output, self.visible(job) as gpus:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **variables, **gpus},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own processes end with it
            )
            try:
                code: int | None = process.wait(60 * job.minutes)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        seconds = round(time.perf_counter() - start, 1)
        result = self._result(job, command, code, seconds, log.read_text(errors="replace"))
        typer.echo(json.dumps({key: value for key, value in result.items() if key != "command"}))
        if job.keeps_results and record.exists():
            result["results"] = json.loads(record.read_text())["results"]
        return result

    def _result(self, job: Job, command: list[str], code: int | None, seconds: float, text: str) -> dict[str, Any]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        words = ["python" if word == sys.executable else word for word in command]
        result = {"name": job.name, "exit_code": code, "seconds": seconds, "counts": counts_of(lines)}
        result["commit"] = self.start["commit"]
        passes = code == 0 or (code == 5 and "pytest" in words)  # no test of this file is selected
        if not passes:
            result["tail"] = text[-TAIL:]
        if code is None:
            result["reason"] = f"ended after {job.minutes:g} minutes"
        shown = [Path(word).name if str(self.logs) in word else word for word in words]
        return {**result, "right": passes, "command": " ".join(shown)}


def _earlier_jobs(path: Path | None, start: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the record at `path`, which must be of the same device and versions."""
    if path is None or not path.exists():
        return []
    record = json.loads(path.read_text())
    differ = [key for key in ("device", "versions") if record[key] != start[key]]
    if differ:
        raise typer.BadParameter(f"{path} has other {' and '.join(differ)}: name another file.", param_hint="--json")
    return record["jobs"]


# What jobs end with: pytest's counts, those of parity, and of the scripts here
_COUNTS = re.compile(r"\b\d+ (?:passed|failed|skipped|cases|equal|of|arms|finite)\b|\b\d+ \w+ equal\b")


def counts_of(lines: list[str]) -> str:
    """The last line that counts something, or the last one."""
    counting = [line for line in lines if _COUNTS.search(line)]
    return (counting or lines or [""])[-1][:200]


def selected(jobs: list[Job], only: list[str], skip: list[str]) -> list[Job]:
    """The jobs to run, in the order of `only`."""
    found = {job.name: job for word in only or [""] for job in jobs if word in job.name}
    return [job for job in found.values() if not any(word in job.name for word in skip)]


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="jobs with this in their name; may be repeated")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="not those with this in their name")] = None,
    random_cases: Annotated[int, typer.Option("--random", help="drawn cases of each dtype")] = 200,
    seed: Annotated[int, typer.Option(help="from which they are drawn")] = 1,
    soak_steps: Annotated[int, typer.Option(help="of each long training")] = 500,
    jobs: Annotated[int, typer.Option(help="jobs at a time: tiny models leave a GPU idle")] = 1,
    processes: Annotated[int, typer.Option(help="processes of each parity job")] = 2,
    list_jobs: Annotated[bool, typer.Option("--list", help="print the jobs and stop")] = False,
    logs: Annotated[Path | None, typer.Option(help="folder for the outputs")] = None,
    commit: Annotated[str | None, typer.Option(help="for the record, where there is no git")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the record")] = None,
) -> None:
    """Run the matrix; exit with 1 when a job failed."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    everything = jobs_of(device, random_cases, seed, soak_steps, processes)
    chosen = selected(everything, only or [], skip or [])
    if list_jobs:
        for job in chosen:
            typer.echo(f"{job.name:50} {' '.join(job.command[1:])}")
        return
    if device == "cuda" and not gpus:
        raise typer.BadParameter("torch sees no CUDA device.")
    chosen = [job for job in chosen if job.gpus <= gpus]
    logs = logs or Path(tempfile.mkdtemp(prefix="gpu-matrix-"))
    logs.mkdir(parents=True, exist_ok=True)
    start = {**environment(device, commit), "gpus": gpus}
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1) // 2)
    matrix = Matrix(logs.absolute(), threads, start, [job.name for job in everything], json_file)
    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(matrix.run, chosen))
    failed = [result["name"] for result in results if not result["right"]]
    seconds = round(time.perf_counter() - started)
    typer.echo(f"{len(results) - len(failed)} of {len(results)} jobs right in {seconds} s; logs in {logs}")
    for name in failed:
        typer.echo(f"failed: {name}")
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    app()
