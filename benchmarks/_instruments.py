"""Benchmarks feed, time and record trainers through methods of their own, which change nothing that is trained."""

from unittest import mock

from trl_fused_grpo import trainer
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.training import checks, findings, state


def hide_instruments() -> None:
    """From here on methods that a benchmark replaced, and its modes, do not count, so that no faster path is left."""
    for module in (findings, checks, state, trainer):
        mock.patch.object(module, "replaced_method", return_value=None).start()
    mock.patch.object(torch_compat, "foreign_mode", return_value=None).start()
    mock.patch.object(trl_compat, "is_asked_by_generation", return_value=True).start()
