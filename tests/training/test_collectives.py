"""Processes choose the same layout, and tell one another only what they need for it."""

from types import SimpleNamespace
from zlib import crc32

import pytest
import torch

from tests.modeling.test_wide_rows import limit_width
from trl_fused_grpo._utils import on_any_process
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training.engine import widest_batch
from trl_fused_grpo.training.state import images_on_any_process


def beside(values, what=None):
    """An accelerator of two processes, the other of which has these values, and tells of the same unless `what`."""

    def gather(mine):
        first = mine[0, 0].item() if what is None else crc32(what.encode())
        return torch.cat([mine, torch.tensor([[first, *values]])])

    return SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)


def alone():
    def gather(_):
        pytest.fail("there is nothing to agree on")

    return SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)


def test_a_batch_has_images_where_any_process_has_some():
    model = tiny_model("qwen3-vl")
    assert images_on_any_process(beside([True]), model, False) and images_on_any_process(beside([False]), model, True)
    assert not images_on_any_process(beside([False]), model, False)


def test_a_batch_is_as_wide_as_the_widest_of_any_process():
    model = tiny_model("llama")
    limit_width(model.config, 100)
    assert widest_batch(beside([3, 50]), model, (4, 20)) == (4, 50)


def test_models_without_images_and_without_a_limit_ask_nobody():
    model = tiny_model("llama")
    assert not images_on_any_process(alone(), model, False)
    assert widest_batch(alone(), model, (4, 20)) == (4, 20)


def test_processes_that_tell_of_different_things_are_told_so():
    assert on_any_process(beside([True], "memory"), "memory", False)
    with pytest.raises(RuntimeError, match="this one tells the others of its memory, and they tell something else"):
        on_any_process(beside([True], "trial of a layout"), "memory", False)
