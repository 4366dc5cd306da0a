"""
`Trainer` calls `model.train()` in every micro-batch, which visits all modules to set a mode that they have already. The
GPU waits meanwhile: 1.4 ms for the 427 modules of a model of 28 layers, where looking takes 0.1 ms.
"""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trl_fused_grpo._compat.torch import modules_of


# What sets the mode and does nothing else where it does not change
_KNOWN = {nn.Module.train, PreTrainedModel.train, DistributedDataParallel.train}


@contextmanager
def train_mode_kept(model: nn.Module) -> Generator[None, None, None]:
    """
    While it lasts, the first call of `model.train()` does nothing where it would change nothing.

    Args:
        model (`nn.Module`): in its wrappers.
    """
    if "train" in vars(model):  # the user's
        yield
        return

    def train(mode: bool = True) -> nn.Module:
        vars(model).pop("train", None)
        return model if mode and _all_train(model) else model.train(mode)

    vars(model)["train"] = train
    try:
        yield
    finally:
        vars(model).pop("train", None)


def _all_train(model: nn.Module) -> bool:
    modules = modules_of(model)
    is_known = all("train" not in vars(module) for module in modules)
    return is_known and {type(m).train for m in modules} <= _KNOWN and all(module.training for module in modules)
