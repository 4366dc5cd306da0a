"""Starts workers as torchrun does on one machine, or on several of one process group."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def launch(words: list[str], processes: int, nodes: int = 1, seconds: int = 1700) -> str:
    """
    Start a module on several processes and return what they printed. Nothing outlives the call.

    Args:
        words (`list[str]`):
            The module, and its arguments.
        processes (`int`):
            Of each node.
        nodes (`int`):
            How many agents of torchrun there are; more than one meet at a loopback address.
        seconds (`int`):
            After which all are stopped.
    """
    meet = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    meet += [] if nodes == 1 else ["--rdzv-backend", "c10d", "--rdzv-id", "0"]
    agents = [
        _start([*meet, *(["--node-rank", str(node)] if nodes > 1 else []), "--nproc-per-node", str(processes)], words)
        for node in range(nodes)
    ]
    return "\n".join([_printed(agent, agents, seconds) for agent in agents])


def _printed(agent: subprocess.Popen[str], agents: list[subprocess.Popen[str]], seconds: int) -> str:
    try:
        return agent.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        for each in agents:
            each.send_signal(signal.SIGTERM)  # torchrun ends its workers
        return agent.communicate()[0] + f"\nstopped after {seconds} s"


def worker_environment() -> dict[str, str]:
    """The variables of a worker: no GPU, one thread, this checkout first."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def _start(options: list[str], words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "-m", *words],
        cwd=ROOT,
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
