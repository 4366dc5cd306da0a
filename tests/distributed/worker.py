"""
Trains the runs of one launch, and writes down what came out.

    torchrun --nproc-per-node 2 -m tests.distributed.worker LAUNCH FOLDER

`FOLDER` holds a checkpoint `<model>/` and micro-batches `<model>.pt` for each model. Each run leaves there what each
rank saw, `<run>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.tiny import PAD_ID, tokenizer
from trl_fused_grpo.training import eligibility

from .adapters import HEADS, TOGETHER, Head, adapter, adapters_disabled, dense_log_probs
from .wrong_forecast import misled


RANKS = 2
STEPS = 3
ACCUMULATION = 2
LAST_LEARNING_RATE = 1e3
ROWS = 3  # completions to a micro-batch of one rank
HANG = timedelta(seconds=60)  # a collective that waits longer raises

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """
    One training run.

    Attributes:
        backend (`str`):
            `"ddp"`, `"fsdp1"`, `"fsdp2"`, `"zero2"` or `"zero3"`.
        case (`str`):
            `"untied"` or `"tied"` embeddings; `"lora"`; `"reference"`: beta is not zero, and the trainer's own passes
            give old and reference log-probs; `"bf16"`: the same under mixed precision; `"window"`: the host cuts the
            micro-batches itself, and those of a window share a pass. Or one of [`adapters.HEADS`] and
            [`adapters.TOGETHER`].
        trainer (`str`):
            `"stock"`, `"dense"`: stock on log-probs from the model's own logits, `"fused"`, or `"misled"`: fused, and
            rank 1 alone is given a wrong forecast.
    """

    backend: str
    case: str
    trainer: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.case}-{self.trainer}"

    @property
    def head(self) -> Head | None:
        return HEADS.get(self.case) or TOGETHER.get(self.case)

    @property
    def model(self) -> str:
        return "tied" if self.case == "tied" or (self.head and self.head.tied) else "llama"

    @property
    def refers(self) -> bool:
        return self.case in ("reference", "bf16") or bool(self.head and self.head.refers)


def _runs(backend: str, *cases: str, misled: tuple[str, ...] = ()) -> list[Run]:
    runs = [Run(backend, case, trainer) for case in cases for trainer in ("stock", "fused")]
    return runs + [Run(backend, case, "misled") for case in misled]


def _heads(backend: str, *cases: str) -> list[Run]:
    return [Run(backend, case, "fused") for case in cases]


# What the engine cannot train, whichever the trainer
REFUSED = [
    Run(backend, case, trainer)
    for backend, case in (
        ("fsdp2", "saved-head-tied"),
        ("fsdp2", "lora-head-together"),
        ("fsdp1", "saved-head-together"),
    )
    for trainer in ("dense", "fused")
]

# DDP first: Accelerate leaves in the environment that FSDP was used
LAUNCHES = {
    "torch": [
        *_runs("ddp", "untied", "tied", "lora", "window", misled=("untied",)),
        *_heads("ddp", "lora-head", "saved-head"),
        *_runs("fsdp2", "untied", "tied", "reference", "lora", "window", misled=("untied", "tied")),
        *_heads("fsdp2", "lora-head", "lora-head-tied", "saved-head"),
        *_runs("fsdp1", "untied", "reference", "window", misled=("untied",)),
        *_heads("fsdp1", *HEADS),
        *_runs("fsdp2", "bf16"),
        *REFUSED,
    ],
    "deepspeed": [
        *_runs("zero3", "untied", "tied", "reference", "lora", "window", misled=("untied", "tied")),
        *_heads("zero3", "lora-head", "lora-head-tied", "saved-head", "saved-head-tied"),
        *_runs("zero2", "untied", "window"),
        *_heads("zero2", "lora-head", "saved-head"),
    ],
}


class Fed(GRPOTrainer):
    """Trains on given micro-batches instead of generating some, and remembers what it saw."""

    def feed(self, batches: list[Batch], own_passes: bool, own_cut: bool) -> None:
        self.batches, self.own_passes, self.own_cut = batches, own_passes, own_cut
        self.losses: list[float] = []
        self.passes: list[list] = []
        self.recomputed: list[tuple[int, int]] = []
        self.waited: list[bool] = []

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        return join(self.batches[self._step : self._step + ACCUMULATION])

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        if self.own_cut:
            return super()._prepare_inputs(generation_batch)
        batch = dict(self.batches[self._step])
        if self.own_passes:
            batch["old_per_token_logps"] = self._score(self.model, batch)
            with adapters_disabled(self):
                batch["ref_per_token_logps"] = self._score(self.ref_model or self.model, batch)
            self.passes.append([batch[f"{policy}_per_token_logps"].tolist() for policy in ("old", "ref")])
        return batch

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Log-probs `[B, T]` as the host asks for them after generation, two rows at a time."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logps = self._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].size(1), 2)[0]
        return logps * batch["completion_mask"]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == STEPS - 1:
            for group in self.optimizer.param_groups:
                group["lr"] = LAST_LEARNING_RATE
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        if isinstance(self, FusedGRPOTrainer):
            self.waited.append(self._fused.merger.is_waiting)
            self.recomputed.append((self.fused_stats.recomputed, self.fused_stats.rows))
        return loss


class FedFused(Fed, FusedGRPOTrainer):
    pass


class FedDense(Fed):
    """Takes log-probs from the model's own logits, where TRL's own would leave an adapter on the head out."""

    _get_per_token_logps_and_entropies = dense_log_probs


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches in one, padded to one width."""
    joined = {}
    for name in batches[0].keys() - {"num_items_in_batch"}:
        values = [batch[name] for batch in batches]
        if name.startswith(("prompt", "completion", "old")):
            width = max(value.shape[1] for value in values)
            left = name.startswith("prompt")
            values = [_pad(value, width - value.shape[1], left) for value in values]
        joined[name] = torch.cat(values)
    return {**joined, "num_items_in_batch": batches[0]["num_items_in_batch"]}  # the host counts rows in the first


def _pad(values: torch.Tensor, by: int, left: bool) -> torch.Tensor:
    return torch.nn.functional.pad(values, (by, 0) if left else (0, by), value=PAD_ID)


def build(run: Run, folder: Path, batches: list[Batch], **options: Any) -> Fed:
    """
    A trainer that takes one optimizer step for every two of `batches`.

    Plain SGD without clipping; the last step is so long that how far the parameters moved is its gradient, next to
    which their rounding is nothing.
    """
    shares_passes = run.case == "window" and run.trainer == "fused"
    options |= {"fused_max_tokens_per_forward": 1000} if shares_passes else {}
    args = (FusedGRPOConfig if shares_passes else GRPOConfig)(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=len(batches[0]["completion_ids"]),
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=ROWS,
        max_steps=STEPS,
        max_completion_length=16,
        loss_type="dapo",
        beta=0.5 if run.refers else 0.0,
        bf16=False,
        optim="sgd",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=1e6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_liger_loss=run.trainer not in ("stock", "dense"),
        gradient_checkpointing=not (run.head and run.head.keeps_activations),
        model_init_kwargs={"dtype": "float32", "device_map": None},
        **options,
    )
    torch.manual_seed(0)
    trainer_class = {"stock": Fed, "dense": FedDense}.get(run.trainer, FedFused)
    with trl_compat.adapter_on_head_allowed() if run.trainer == "dense" else nullcontext():
        trainer = trainer_class(
            model=str(folder / run.model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * 24}),
            processing_class=tokenizer(),
            peft_config=adapter(run.case),
        )
    trainer.use_vllm = True  # so that importance ratios count; the constructor would start vLLM
    trainer.feed(batches, own_passes=run.refers, own_cut=run.case == "window")
    return trainer


def train(trainer: Fed) -> tuple[dict[str, Any], Batch]:
    """Train, and return what this rank saw and how far each parameter moved."""
    start = _whole_parameters(trainer)
    trainer.train()
    moved = {name: value - start[name] for name, value in _whole_parameters(trainer).items()}
    seen = {
        "world": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sorted({_kind(parameter) for parameter in trainer.model_wrapped.parameters()}),
        "losses": trainer.losses,
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "passes": trainer.passes,
        "recomputed": trainer.recomputed,
        "waited": trainer.waited,
    }
    return seen, moved


def _kind(parameter: torch.nn.Parameter) -> str:
    return "zero3" if hasattr(parameter, "ds_id") else type(parameter).__name__


def _whole_parameters(trainer: Fed) -> Batch:
    """The parameters by name, put together from all ranks."""
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


def _launcher_options(run: Run) -> dict[str, Any]:
    """
    What a launcher's configuration would say.

    Accelerate gives DDP to every process that it knows to be on the CPU, whatever else was asked for. Its state is made
    here instead, with the kind of device left open.
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


def _train(run: Run, folder: Path, rank: int) -> tuple[dict[str, Any], Batch]:
    batches = torch.load(folder / f"{run.model}.pt")[rank]
    trainer = None
    try:
        trainer = build(run, folder, batches, **_launcher_options(run))
        shared = mock.patch.object(eligibility, "why_micro_batches_are_seen", return_value=None)
        with ExitStack() as stack:
            if run.trainer == "misled" and rank == 1:
                stack.enter_context(misled())
            if run.case == "window":  # what feeds the trainer replaced its methods, but reads nothing
                stack.enter_context(shared)
            return train(trainer)
    except Exception as error:
        if run not in REFUSED:
            raise
        return {"error": f"{type(error).__name__}: {error}", "was_built": trainer is not None}, {}


def main(launch: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=HANG)
    rank = dist.get_rank()
    for run in LAUNCHES[launch]:
        seen, moved = _train(run, folder, rank)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen)
        if rank == 0:
            save_file(moved, folder / f"{run.name}.safetensors")
            (folder / f"{run.name}.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
