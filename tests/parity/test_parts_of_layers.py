"""
Whole trainings in which a user replaces parts of layers are stock's: with kernels in the place of all parts until
something is replaced, and with none from then on.
"""

import os
import subprocess
import sys
from unittest import mock

import pytest

from tests.harness import compare
from tests.harness.cases.model import parts_of_layers
from tests.ops.test_triton_kernels import CUDA, DEVICE, INTERPRETED, gpu, kernels_run
from trl_fused_grpo.modeling.layer_kernels import KernelFunction
from trl_fused_grpo.parity import Settings
from trl_fused_grpo.training import engine


CASES = {case.name: case for case in parts_of_layers()}
# In the interpreter each takes minutes: one of each way to replace something
INTERPRETED_CASES = ("part-norm-class", "part-activation-hook-later", "part-silu-later", "part-rotate-half-later")


@gpu
@kernels_run
@pytest.mark.parametrize("name", INTERPRETED_CASES if INTERPRETED else CASES)
def test_a_training_is_stock_s(name, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "why_not_triton", lambda device: None)
    kernel = mock.Mock(wraps=KernelFunction.__call__)
    monkeypatch.setattr(KernelFunction, "__call__", lambda self, *args: kernel(self, *args))
    result = compare(CASES[name], Settings(tmp_path, DEVICE))
    assert (result.verdict, result.reason) == ("equal", "")
    is_known_at_first = name.endswith("-later") or name == "part-activation"  # by another of torch's
    assert kernel.called == is_known_at_first


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tests above run without it")
def test_trainings_are_stock_s_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-o", "addopts=", "--import-mode=importlib"]
    command += ["--timeout", "900"]  # each takes minutes
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert f"{len(INTERPRETED_CASES)} passed" in result.stdout
