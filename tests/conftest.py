"""Settings for every test: no hub, no telemetry, one seed."""

import os


# before transformers is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """One seed, and no mixed precision left over: transformers 4 hands it on to later arguments in the environment."""
    torch.manual_seed(0)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
