"""Drop-in `GRPOTrainer` for TRL whose fused loss trains exactly what TRL's own loss trains."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"
__all__ = [
    "FusedGRPOConfig",
    "FusedGRPOTrainer",
    "FusedLinearGRPOLoss",
    "FusedRLOOConfig",
    "FusedRLOOTrainer",
    "FusedStats",
    "LMHead",
    "fuse",
    "fuse_config",
    "fused_linear_logps",
    "patch",
    "read_hidden_states",
    "read_lm_head",
]


def _is_command() -> bool:
    """Return `True` in a process of `trl-fused-grpo`, whose help is to need neither torch nor TRL."""
    program = sys.argv[0]  # "-m" while Python looks for the module to run
    return Path(program).stem == "trl-fused-grpo" or (program == "-m" and __name__ in sys.orig_argv)


if TYPE_CHECKING or not _is_command():
    # At once: TRL's configurations get their field, and its classes what `patch` needs
    from .api import (
        FusedGRPOConfig,
        FusedGRPOTrainer,
        FusedLinearGRPOLoss,
        FusedRLOOConfig,
        FusedRLOOTrainer,
        FusedStats,
        LMHead,
        fuse,
        fuse_config,
        fused_linear_logps,
        patch,
        read_hidden_states,
        read_lm_head,
    )
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".api", __name__), name)
