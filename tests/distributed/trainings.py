"""
Trains on what a tiny model generates, through `trainer.train()`, each training of one launch after the other.

    torchrun --nproc-per-node 2 -m tests.distributed.trainings LAUNCH FOLDER

`FOLDER` holds the models. Each training leaves there what each rank saw, `<training>.json`, and how far each parameter
moved, `<training>.safetensors`.
"""

import json
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer as trl_module
from trl.trainer.grpo_trainer import get_peft_model

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer, FusedRLOOConfig, FusedRLOOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.head.fused_forward import FusedRequest

from .adapters import dense_log_probs
from .engines import launcher_options, parameter_kind, plain_sgd, whole_parameters
from .rollouts import drawn, shuffled_alike
from .table import GENERATIONS, LAUNCHES, PROMPTS, STEPS, Training


HANG = timedelta(seconds=300)  # a collective that waits longer raises
LAYERS = ("Qwen3DecoderLayer", "CLIPEncoderLayer")  # this model names one without layers of its own


# Stock, and fused
CONFIGS = {"grpo": (GRPOConfig, FusedGRPOConfig), "rloo": (RLOOConfig, FusedRLOOConfig)}
TRAINERS = {"grpo": (GRPOTrainer, FusedGRPOTrainer), "rloo": (RLOOTrainer, FusedRLOOTrainer)}


class Dense(GRPOTrainer):
    """Takes log-probs from the model's own logits, where TRL's own would leave an adapter on the head out."""

    _get_per_token_logps_and_entropies = dense_log_probs


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


def prompts(training: Training) -> Dataset:
    """Of several lengths, each once in a generation batch."""
    texts = [f"{i} times {i * i} is what number?"[: 8 + 3 * i % 17] for i in range(PROMPTS)]
    assert len({*texts}) == PROMPTS  # completions are drawn by what stands before them
    if training.of.model == "text" and not training.of.tools:
        return Dataset.from_dict({"prompt": texts})
    chats: dict[str, list] = {"prompt": [[{"role": "user", "content": text}] for text in texts]}
    if training.of.model == "images":
        pixels = np.random.default_rng(0).integers(0, 256, (PROMPTS, 16, 16, 3), dtype=np.uint8)
        chats["images"] = [[Image.fromarray(image)] for image in pixels]
    return Dataset.from_dict(chats)


def build(training: Training, folder: Path, **launcher: Any) -> Any:
    """A trainer with plain SGD, whose steps are long beside the rounding of weights."""
    feature, model = training.of, str(folder / training.of.model)
    is_fused, is_alone = training.trainer == "fused", training.engine == "one"
    rows = training.rows // training.micro_batches * (training.processes if is_alone else 1)
    sgd = plain_sgd()
    if training.is_double:
        sgd["model_init_kwargs"]["dtype"] = torch.float64  # no name of one that TRL takes
    args = CONFIGS[feature.algorithm][is_fused](
        output_dir=str(folder / "output"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=training.micro_batches,
        num_generations=GENERATIONS,
        max_steps=STEPS,
        **{
            "max_completion_length": 12,
            "bf16": False,  # the launcher says in what precision
            "gradient_checkpointing": False,
            "beta": 0.0,
            "learning_rate": 0.5,
            **feature.options,
            **(feature.fused_options if is_fused else {}),
        },
        **sgd,
        **({"use_cpu": True} if is_alone and not torch.cuda.is_available() else {}),
        **launcher,
    )
    cls = Dense if training.trainer == "dense" else TRAINERS[feature.algorithm][is_fused]
    with (
        trl_compat.adapter_on_head_allowed() if training.trainer == "dense" else nullcontext(),
        mock.patch.object(trl_module, "get_peft_model", seeded),
    ):
        trainer = cls(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=prompts(training),
            processing_class=AutoProcessor.from_pretrained(model),
            peft_config=adapter(training),
            **({"tools": [multiply]} if feature.tools else {}),
        )
    if training.precision == "fp16" and trainer.accelerator.scaler is None and not trainer.is_deepspeed_enabled:
        scale_losses(trainer.accelerator)
    return trainer


def seeded(*args: Any, **kwargs: Any) -> torch.nn.Module:
    """The same adapters, whatever an engine has drawn while the model was loaded."""
    torch.manual_seed(0)
    return get_peft_model(*args, **kwargs)


def scale_losses(accelerator: Any) -> None:
    """What Accelerate does with float16 on accelerators alone."""
    accelerator.native_amp, kind = True, torch.amp.GradScaler
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as kind  # noqa: N813
    accelerator.scaler = kind(device="cpu", init_scale=2.0**10)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 4 + sum(ids) % 7 for ids in completion_ids]


def adapter(training: Training) -> Any:
    """The PEFT configuration, or `None`."""
    feature = training.of
    if not feature.lora:
        return None
    from peft import LoraConfig

    # Neither factor starts at zero, so both get a gradient
    return LoraConfig(
        r=4,
        target_modules=list(feature.lora),
        modules_to_save=list(feature.saved) or None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


@contextmanager
def forwards_counted(counts: list[int]):
    """While it lasts, a one is added for every forward of the policy whose log-probs get a gradient."""
    run = FusedRequest.__call__

    def counted(self, *args: Any, **kwargs: Any) -> Any:
        counts.append(torch.is_grad_enabled())
        return run(self, *args, **kwargs)

    with mock.patch.object(FusedRequest, "__call__", counted):
        yield


def train(training: Training, folder: Path, rank: int = -1) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train, and return what this rank saw and how far each parameter moved."""
    layers = LAYERS if training.of.model == "images" else ()
    launcher = {} if rank < 0 else launcher_options(training.engine, training.precision, layers=layers)
    trainer = build(training, folder, **launcher)
    start = whole_parameters(trainer)
    forwards: list[int] = []
    completions: list[list[list[int]]] = []

    def recording(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.append(completion_ids)
        return reward(completion_ids)

    trainer.reward_funcs = [recording]
    with ExitStack() as stack:
        reads_model = training.of.precision == "no"
        stack.enter_context(drawn(trainer.processing_class, reads_model, training.of.tools))
        stack.enter_context(shuffled_alike(training.rows, training.micro_batches, rank, training.processes))
        stack.enter_context(forwards_counted(forwards))
        trainer.train()
    moved = {name: value - start[name] for name, value in whole_parameters(trainer).items()}
    seen = {
        "world": trainer.accelerator.num_processes,
        "local_rank": trainer.accelerator.local_process_index,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sorted({parameter_kind(parameter) for parameter in trainer.model_wrapped.parameters()}),
        "scaler": scaler_of(trainer),
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "completions": completions,
        "forwards": sum(forwards),
        "rounding": {name: value.norm().item() * 2.0**-24 for name, value in start.items()},
    }
    if training.trainer == "fused":
        seen["layout"] = trainer.fused_stats.layout
    return seen, moved


def scaler_of(trainer: Any) -> str | None:
    """The class of what scales losses in float16."""
    engine: Any = trainer.model_wrapped
    if trainer.is_deepspeed_enabled:
        return type(engine.optimizer.loss_scaler).__name__ if engine.fp16_enabled() else None
    scaler = trainer.accelerator.scaler
    return None if scaler is None else type(scaler).__name__


def main(launch: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=HANG)
    rank = dist.get_rank()
    for training in LAUNCHES[launch]:
        seen, moved = train(training, folder, rank)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen)
        if rank == 0:
            save_file(
                {name: value.contiguous() for name, value in moved.items()}, folder / f"{training.name}.safetensors"
            )
            (folder / f"{training.name}.json").write_text(json.dumps(everyone))
            print(training.name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
