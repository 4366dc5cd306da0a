"""The recipes of several processes, started by `accelerate launch` with the configurations of `examples/accelerate`."""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from . import small


pytestmark = [
    pytest.mark.example,
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="examples are written for the newest TRL"),
]

PROCESSES = 2
SECONDS = 240
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def launch(config, folder, **options):
    """Start `train_text.py` as `accelerate launch` does on GPUs, and return what its processes saw."""
    result = folder / "seen.json"
    state = json.dumps({"use_configured_state": True})  # which the worker makes
    words = small.arguments(folder, **options, accelerator_config=state)
    root = small.EXAMPLES.parent
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    process = subprocess.Popen(
        [
            *accelerate,
            *("--num_processes", str(PROCESSES), "--mixed_precision", "no", "--main_process_port", "0"),
            *("-m", "tests.examples.worker", "train_text", str(result), *words),
        ],
        cwd=root,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its workers
        printed = process.communicate()[0] + f"\nstopped after {SECONDS} s"
    if not result.exists():
        pytest.fail(f"the recipe did not finish:\n{printed[-6000:]}")
    return json.loads(result.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "options", "wrapper", "parameters", "saved"),
    [
        pytest.param("fsdp2", {"lora": "true"}, "FSDPPeftModel", ["DTensor"], "adapter_model", id="FSDP2 and LoRA"),
        pytest.param("zero3", {}, "DeepSpeedEngine", ["zero3"], "model", id="ZeRO-3", marks=NEEDS_DEEPSPEED),
    ],
)
def test_training_on_text_in_two_processes(config, options, wrapper, parameters, saved, tmp_path):
    folders = {
        "model": small.save_model(tmp_path / "model"),
        "dataset": small.save_problems(tmp_path / "problems"),
    }
    seen = launch(small.EXAMPLES / "accelerate" / f"{config}.yaml", tmp_path, **folders, **options)
    assert (seen["fused"]["trainer"], seen["stock"]["trainer"]) == ("FusedGRPOTrainer", "GRPOTrainer")
    for kind in ("fused", "stock"):
        assert seen[kind]["world"] == PROCESSES
        assert seen[kind]["wrapper"] == wrapper
        assert seen[kind]["parameters"] == parameters
        weights = load_file(tmp_path / "seen" / kind / f"{saved}.safetensors")
        assert all(weight.numel() for weight in weights.values())
    small.assert_same(seen["fused"]["logs"], seen["stock"]["logs"])
