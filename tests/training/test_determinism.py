"""Two trainings from one seed are equal to the bit: what they log, and the weights in the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import set_seed

from tests.tiny_training import make_trainer


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "determinism.py"
TIMES = ("runtime", "per_second", "step_time")
OPTIONS = {"max_steps": 5, "gradient_accumulation_steps": 2, "num_generations": 2, "gradient_checkpointing": True}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
SHARED = {"fused_max_tokens_per_forward": 10_000}


def train(folder, lora=None, **options):
    set_seed(5)
    if lora is not None:
        lora = pytest.importorskip("peft").LoraConfig(**lora)
    trainer = make_trainer(folder, peft_config=lora, **OPTIONS, **options)
    trainer.train()
    logs = [
        {name: repr(value) for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


CASES = {
    "full": {},
    "shared-forwards": SHARED,
    "reference": {"beta": 0.1, **SHARED},
    "lora": {"lora": LORA, "beta": 0.1, **SHARED},
    "recompute": {"fused_backward": "recompute"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_trainings_from_one_seed_are_equal_to_the_bit(tmp_path, options):
    (first_logs, first), (logs, weights) = (train(tmp_path, **options) for _ in range(2))
    assert len(logs) == OPTIONS["max_steps"] + 1
    assert logs == first_logs
    assert all(torch.equal(weights[name], first[name]) for name in first)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [SHARED, {"lora": LORA, **SHARED}], ids=["full", "lora"])
def test_so_they_are_where_modules_are_compiled(tmp_path, options):
    test_two_trainings_from_one_seed_are_equal_to_the_bit(tmp_path, {"fused_compile": True, **options})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cuda_they_are_under_deterministic_algorithms(dtype):
    # In a process of its own: cuBLAS reads its configuration once
    arms = ["default", "beta", "LoRA", "a forward for each micro-batch", "backward computed again"]
    command = [sys.executable, str(SCRIPT), "--device", "cuda", "--dtype", dtype, "--skip-default"]
    command += [word for arm in arms for word in ("--arm", arm)]
    paths = filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
