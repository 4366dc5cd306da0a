"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
SECONDS = 280  # after which a process is ended


def run_python(
    *words: object,
    python: Path | str = sys.executable,
    folder: Path | None = None,
    succeeds: bool = True,
) -> subprocess.CompletedProcess[str]:
    """
    Run Python on the CPU, without this checkout on its path. Nothing outlives the call.

    Args:
        words (`object`): of the command line.
        python (`Path` or `str`, *optional*): the interpreter, and with it the environment; this one's by default.
        folder (`Path`, *optional*): the working directory.
        succeeds (`bool`, *optional*, defaults to `True`): whether the test fails when the process does.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its workers
        out, err = process.communicate()
    assert process.returncode == 0 or not succeeds, out[-2000:] + err[-2000:]
    return subprocess.CompletedProcess(command, process.returncode, out, err)
