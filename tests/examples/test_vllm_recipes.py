"""
The vLLM recipe, colocated and with a server, on vLLM's CPU build. Each training is in processes of its own, since an
engine or a server leaves much behind.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from . import server_on_cpu, small


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.example, pytest.mark.timeout(900)]

STEPS = 3
SECONDS = 400
ROOT = small.EXAMPLES.parent
# So long are the steps that log-probs differ by 0.1 and more where the first weights go on generating
OPTIONS = {"learning_rate": 1e-2, "max_steps": STEPS}


def environment(*paths):
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def start(words, output, *paths):
    """A process group of its own, so that it can be ended with all that it starts."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(*paths),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process):
    """End a process with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-recipe")
    return {"model": small.save_model(folder / "model"), "dataset": small.save_prompts(folder / "prompts")}


@pytest.fixture
def server(folders, tmp_path):
    """Address of a server that `trl vllm-serve` has started."""
    import requests

    server_on_cpu.install(tmp_path / "plugin")
    port = free_port()
    words = ["-m", "trl.cli.main", "vllm-serve", "--model", str(folders["model"])]
    words += ["--port", str(port), "--max_model_len", "128", "--dtype", "bfloat16", "--enforce_eager", "true"]
    words += ["--weight-transfer-config", json.dumps({"backend": server_on_cpu.BACKEND})]
    printed = tmp_path / "server.txt"
    with printed.open("w") as output:
        process = start(words, output, tmp_path / "plugin")
        try:
            until = time.monotonic() + SECONDS
            while True:
                try:
                    if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except requests.ConnectionError:
                    pass
                if process.poll() is not None or time.monotonic() > until:
                    pytest.fail(f"the server did not start:\n{printed.read_text()[-6000:]}")
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            end(process)


def train(launcher, folders, folder, **options):
    """What the recipe logged, trained by this launcher."""
    result, printed = folder / "seen.json", folder / "training.txt"
    words = small.arguments(folder, **folders, **OPTIONS, use_cpu="true", **options)
    with printed.open("w") as output:
        process = start([*launcher, "-m", "tests.examples.vllm_worker", str(result), *words], output)
        try:
            process.wait(SECONDS)
        finally:
            end(process)
    if not result.exists():
        pytest.fail(f"the recipe did not finish:\n{printed.read_text()[-6000:]}")
    assert "has no effect" not in printed.read_text()  # what `fused_skip_old_logps=True` says where it cannot act
    return json.loads(result.read_text())


def assert_trained_on_policy(logs):
    assert [entry["step"] for entry in logs] == list(range(1, STEPS + 1))
    for entry in logs:
        assert entry["grad_norm"] > 0
        assert entry["fused/rows_recomputed"] == 0.0
        # bfloat16 in the engine against float32 here: never zero, and small only if the engine has the weights
        assert 1e-5 < entry["sampling/sampling_logp_difference/mean"] < 0.02
        ratios = [entry[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
        assert 0.9 < ratios[0] < ratios[1] < ratios[2] < 1.1


def test_colocated_training(folders, tmp_path):
    seen = train([], folders, tmp_path, vllm_gpu_memory_utilization=0.1, vllm_max_model_length=128)
    assert (seen["mode"], seen["world"]) == ("colocate", 1)
    assert_trained_on_policy(seen["logs"])


def test_training_with_a_server(server, folders, tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no"]
    launcher += ["--main_process_port", "0"]
    seen = train(launcher, folders, tmp_path, server=server, vllm_group_port=free_port(), fused_verify=1)
    assert (seen["mode"], seen["world"], seen["wrapper"]) == ("server", 2, "DistributedDataParallel")
    assert_trained_on_policy(seen["logs"])
    assert seen["logs"][0]["num_tokens"] > 2 * 4 * 8  # of both processes
    for entry in seen["logs"]:  # beside TRL's own path, on what the server generated
        assert entry["fused/verify_logps"] < small.TOLERANCE
