"""
Runs of one or several processes, one after the other. Each has processes of its own, forked from one that has imported
everything: a run may be killed, and begins in two seconds.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .launching import ROOT, free_port, worker_environment


QUICK = "quick"  # a launch that every `make test` has
RUN_SECONDS = 180  # a run that takes longer hangs, and is ended


def launch(worker: str, launch_name: str, folder: Path, seconds: float) -> str:
    """
    Run everything that a worker has under a name, and return what was printed.

    Args:
        worker (`str`): a module of this folder with `LAUNCHES`, lists of runs by name, and `work(run, folder, rank)`.
        launch_name (`str`): a name in its `LAUNCHES`.
        folder (`Path`): for what the runs leave. Exit codes and seconds of each are in `<run>.exit.json`.
        seconds (`float`): after which everything is ended.
    """
    command = [sys.executable, "-m", "tests.distributed.forked", worker, launch_name, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=worker_environment(), start_new_session=True, **pipes)
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0] + f"\nstopped after {seconds} s"


def _fork(work: Any, run: Any, folder: Path, rank: int, port: int) -> int:
    """Start a process of a run, and return its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch.distributed as dist

        if run.processes > 1:
            addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
            sizes = {"WORLD_SIZE": run.processes, "LOCAL_WORLD_SIZE": run.processes}
            os.environ.update({name: str(value) for name, value in (addresses | sizes).items()})
            dist.init_process_group("gloo")
        work(run, folder, rank)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_of(pids: list[int]) -> list[int]:
    """
    The exit codes of processes, in order; that of a killed one is the negative signal. When one fails, or at
    [`RUN_SECONDS`], the others are killed, as by a launcher.
    """
    deadline = time.monotonic() + RUN_SECONDS
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in {*pids} - codes.keys():
            if _has_ended(pid):
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if codes[pid]:  # those that hear of it have some time to fail by themselves
                    deadline = min(deadline, time.monotonic() + 3)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def main(worker: str, launch_name: str, folder: Path) -> None:
    module = importlib.import_module(f"tests.distributed.{worker}")
    for run in module.LAUNCHES[launch_name]:
        print(f"=== {run.name}", flush=True)
        start, port = time.monotonic(), free_port()
        codes = _end_of([_fork(module.work, run, folder, rank, port) for rank in range(run.processes)])
        seconds = time.monotonic() - start
        print(f"=== {run.name}: exit codes {codes}, {seconds:.1f} s", flush=True)
        (folder / f"{run.name}.exit.json").write_text(json.dumps({"codes": codes, "seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
