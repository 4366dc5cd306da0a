"""
Trains the runs of one launch, and writes down what came out.

    torchrun --nproc-per-node 2 -m tests.distributed.worker LAUNCH FOLDER

`FOLDER` holds a checkpoint `<model>/` and micro-batches `<model>.pt` for each model. Each run leaves there what each
rank saw, `<run>.json`, and how far each parameter moved, `<run>.safetensors`.
"""

import json
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from trl import GRPOConfig, GRPOTrainer

from tests.compiler import traced_layers
from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.tiny import tokenizer
from trl_fused_grpo.training import findings

from .adapters import adapter, adapters_disabled, dense_log_probs
from .architectures import deafen, limit_width
from .batches import Batch, join
from .engines import launcher_options, parameter_kind, plain_sgd, whole_parameters
from .runs import LAUNCHES, NIGHTLY_LAUNCHES, REFUSED, ROWS, STEPS, Run
from .wrong_forecast import misled


LAST_LEARNING_RATE = 1e3
HANG = timedelta(seconds=300)  # a collective that waits longer raises


class Fed(GRPOTrainer):
    """Trains on given micro-batches instead of generating some, and records what it computes."""

    def feed(self, batches: list[Batch], run: Run) -> None:
        self.batches, self.accumulation = batches, run.accumulation
        self.computes_logps, self.is_split_by_trl = run.refers, run.shares_forwards
        self.losses: list[float] = []
        self.logps: list[list] = []
        self.recomputed: list[tuple[int, int]] = []
        self.waited: list[bool] = []
        self.layouts: list[str] = []
        self.collectives: dict[str, int] = {}  # of the last accumulation window, where TRL splits batches

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        return join(self.batches[self._step : self._step + self.accumulation])

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        if self.is_split_by_trl:
            return super()._prepare_inputs(generation_batch)
        batch = dict(self.batches[self._step])
        if self.computes_logps:
            batch["old_per_token_logps"] = self._log_probs(self.model, batch)
            with adapters_disabled(self):
                batch["ref_per_token_logps"] = self._log_probs(self.ref_model or self.model, batch)
            self.logps.append([batch[f"{policy}_per_token_logps"].tolist() for policy in ("old", "ref")])
        return batch

    @torch.no_grad()
    def _log_probs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Log-probs `[B, T]` as TRL asks for them after generation, two rows at a time."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logps = self._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].size(1), 2)[0]
        return logps * batch["completion_mask"]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == STEPS - 1:
            for group in self.optimizer.param_groups:
                group["lr"] = LAST_LEARNING_RATE
        is_counted = self.is_split_by_trl and self.state.global_step == STEPS - 1
        with profile(activities=[ProfilerActivity.CPU]) if is_counted else nullcontext() as profiler:
            loss = super().training_step(*args, **kwargs)
        for event in profiler.key_averages() if is_counted else ():
            if event.key.startswith("c10d::"):
                self.collectives[event.key] = self.collectives.get(event.key, 0) + event.count
        self.losses.append(loss.item())
        if isinstance(self, FusedGRPOTrainer):
            self.waited.append(self._fused.forwards.is_waiting)
            self.recomputed.append((self.fused_stats.recomputed, self.fused_stats.rows))
            self.layouts.append(self.fused_stats.layout)
        return loss


class FedFused(Fed, FusedGRPOTrainer):
    pass


class FedDense(Fed):
    """Takes log-probs from the model's own logits, where TRL's own would leave an adapter on the head out."""

    _get_per_token_logps_and_entropies = dense_log_probs


def build(run: Run, folder: Path, batches: list[Batch], **options: Any) -> Fed:
    """
    Build a trainer that takes one optimizer step for every accumulation window of `batches`.

    The optimizer is plain SGD without clipping. The last step is so long that the movement of the parameters is its
    gradient, beside which their rounding is nothing.
    """
    shares_forwards = run.shares_forwards and run.trainer not in ("stock", "dense")
    options |= {"fused_max_tokens_per_forward": run.most_tokens} if shares_forwards else {}
    options |= {"importance_sampling_level": "sequence"} if run.case == "shared-forward" else {}
    options |= {"fused_compile": True} if run.trainer == "compiled" else {}
    options |= {"fused_verify": 2} if run.trainer == "verified" else {}
    has_options = shares_forwards or run.trainer not in ("stock", "dense", "fused", "misled")
    args = (FusedGRPOConfig if has_options else GRPOConfig)(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=len(batches[0]["completion_ids"]),
        gradient_accumulation_steps=run.accumulation,
        num_generations=ROWS,
        max_steps=STEPS,
        max_completion_length=16,
        loss_type="dapo",
        beta=0.5 if run.refers else 0.0,
        bf16=False,
        learning_rate=0.01,
        **plain_sgd(),
        use_liger_loss=run.trainer not in ("stock", "dense"),
        # Without it DDP looks for parameters that get no gradient
        gradient_checkpointing=not ((run.head and run.head.keeps_activations) or run.case == "images-on-one"),
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
            peft_config=adapter(run.adapted),
        )
    if run.case.startswith("deaf"):
        deafen(trainer.model)
    if run.case == "wide":
        limit_width(trainer.model)
    trainer.use_vllm = run.architecture is None  # so that importance ratios count; the constructor would start vLLM
    trainer.feed(batches, run)
    return trainer


def train(trainer: Fed) -> tuple[dict[str, Any], Batch]:
    """Train, and return what this rank saw and how far each parameter moved."""
    start = whole_parameters(trainer)
    trainer.train()
    moved = {name: value - start[name] for name, value in whole_parameters(trainer).items()}
    seen = {
        "world": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sorted({parameter_kind(parameter) for parameter in trainer.model_wrapped.parameters()}),
        "losses": trainer.losses,
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "logps": trainer.logps,
        "recomputed": trainer.recomputed,
        "waited": trainer.waited,
        "layouts": trainer.layouts,
        "collectives": trainer.collectives,
    }
    return seen, moved


@contextmanager
def fed_as_stock() -> Generator[None, None, None]:
    """While it lasts, the methods that feed a trainer do not count as replaced: they read no micro-batch."""
    with mock.patch.object(findings, "replaced_method", return_value=None):
        yield


def _train(run: Run, folder: Path, rank: int) -> tuple[dict[str, Any], Batch]:
    batches = torch.load(folder / f"{run.data}.pt")[rank]
    trainer = None
    try:
        options = launcher_options(
            run.backend, "bf16" if run.case == "bf16" else "no", bool(run.head and run.head.flat)
        )
        trainer = build(run, folder, batches, **options)
        with ExitStack() as stack:
            warning = stack.enter_context(mock.patch.object(findings.logger, "warning"))
            if run.trainer == "misled" and rank == 1:
                stack.enter_context(misled())
            compiled = stack.enter_context(traced_layers()) if run.trainer == "compiled" else {}
            if run.shares_forwards:
                stack.enter_context(fed_as_stock())
            seen, moved = train(trainer)
            warnings = [call.args[0] for call in warning.call_args_list]
            return {**seen, "warnings": warnings, "compiled": compiled}, moved
    except Exception as error:
        if run not in REFUSED:
            raise
        return {"error": f"{type(error).__name__}: {error}", "was_built": trainer is not None}, {}


def main(launch: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=HANG)
    rank = dist.get_rank()
    for run in (LAUNCHES | NIGHTLY_LAUNCHES)[launch]:
        seen, moved = _train(run, folder, rank)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen)
        if rank == 0:
            save_file(moved, folder / f"{run.name}.safetensors")
            (folder / f"{run.name}.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
