"""What a launcher's configuration would say for each engine, what it makes of a model, and parameters it shards."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def launcher_options(
    backend: str, mixed_precision: str = "no", is_flat: bool = False, layers: Sequence[str] = ()
) -> dict[str, Any]:
    """
    What a launcher's configuration would say; for FSDP1 also whether it trains flat parameters, and for FSDP the
    classes of layers that it shards one by one, where the model does not name them.

    Accelerate uses DDP whenever it knows that a process is on the CPU. So its state is made here, with the kind of
    device left open.
    """
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    if backend == "ddp":
        return {"use_cpu": True}
    AcceleratorState._reset_state(reset_partial_state=True)
    options = engine_options(backend) | {"accelerator_config": {"use_configured_state": True}}
    if backend.startswith("zero"):
        import deepspeed

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        if mixed_precision == "fp16":
            # It would not: it asks for a processor that is fast at float16, torch does not
            deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported = lambda _: True
            options["deepspeed"]["fp16"] = {"enabled": True, "auto_cast": True, "initial_scale_power": 10}
            options["fp16"] = True
        return options
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    fsdp = options["fsdp_config"]
    if backend == "fsdp1":
        fsdp["sync_module_states"] = False  # it does on accelerators only
    if is_flat:
        fsdp["use_orig_params"] = False
    os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
    if layers:
        fsdp["transformer_layer_cls_to_wrap"] = list(layers)
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(layers)  # which PEFT reads
    return options


def engine_options(backend: str) -> dict[str, Any]:
    """The arguments of a trainer that name an engine."""
    if backend.startswith("fsdp"):
        return {"fsdp": True, "fsdp_config": {"version": int(backend[-1])}}
    if not backend.startswith("zero"):
        return {}
    import deepspeed

    # Else it looks for a CUDA toolkit, and on a CPU compiles an all-reduce of its own
    deepspeed.ops.__compatible_ops__ = {}
    return {"deepspeed": _deepspeed_config(int(backend[-1]))}


def plain_sgd() -> dict[str, Any]:
    """Arguments of a trainer with SGD, without clipping, that logs every step and saves nothing."""
    return {
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32", "device_map": None},
    }


def wrapper_and_parameters(backend: str, model: str) -> tuple[str, list[str]]:
    """The class that an engine makes of a model's class, and the kinds of its parameters, see [`parameter_kind`]."""
    return {
        "ddp": ("DistributedDataParallel", ["Parameter"]),
        "fsdp1": ("FullyShardedDataParallel", ["Parameter"]),
        "fsdp2": (f"FSDP{model}", ["DTensor"]),
        "zero2": ("DeepSpeedEngine", ["Parameter"]),
        "zero3": ("DeepSpeedEngine", ["zero3"]),
    }[backend]


def _deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        # No optimizer is named: torch's, which the trainer makes, needs no operation compiled
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
