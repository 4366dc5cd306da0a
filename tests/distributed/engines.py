"""What a launcher's configuration would say for each engine, and parameters gathered from what the engine shards."""

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .runs import Run


def launcher_options(run: Run) -> dict[str, Any]:
    """
    What a launcher's configuration would say.

    Accelerate uses DDP whenever it knows that a process is on the CPU. So its state is made here, with the kind of
    device left open.
    """
    backend = run.backend
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if run.case == "bf16" else "no"
    if backend == "ddp":
        return {"use_cpu": True}
    AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {"accelerator_config": {"use_configured_state": True}}
    if backend.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce of its own
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        return {"deepspeed": _deepspeed_config(int(backend[-1])), **options}
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    # FSDP1 synchronises module states on accelerators only
    fsdp = {"version": 1, "sync_module_states": False} if backend == "fsdp1" else {"version": 2}
    if run.head and run.head.flat:
        fsdp["use_orig_params"] = False
    return {"fsdp": True, "fsdp_config": fsdp, **options}


def _deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def parameter_kind(parameter: torch.nn.Parameter) -> str:
    """How a parameter is sharded."""
    return "zero3" if hasattr(parameter, "ds_id") else type(parameter).__name__


def whole_parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """The parameters by name, gathered from all ranks."""
    if isinstance(trainer.model_wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(trainer.model_wrapped, writeback=False):
            return {name: p.detach().clone() for name, p in trainer.model_wrapped.named_parameters()}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach()
    return parameter.detach().clone()
