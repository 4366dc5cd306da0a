"""
What merging adapters for vLLM does to the weights under them: a LoRA training in bfloat16, whose adapters TRL merges
into the base and takes out again at each step. Stock, and ours with `fused_keep_base_weights`. Completions are made up;
the engine is none, so that nothing but TRL's own synchronisation runs.

    python benchmarks/base_weights.py --json base-weights.json
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from _accumulation import GROUP, ROWS, reward
from _measure import environment
from _rollout import Lengths, Rollout
from _step_clock import step_options
from _trainers import SHAPES, forget_accelerate, make_model
from datasets import Dataset
from records import write_record
from trl import GRPOConfig, GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import tokenizer


LENGTHS = Lengths(prompts=(4, 10), median=16, longest=48)
ADAPTERS: dict[str, Any] = {"lora_alpha": 32, "target_modules": "all-linear"}


class NoEngine(VLLMGeneration):
    """TRL's synchronisation with an engine that forgets what it gets."""

    def __init__(self, trainer: Any):
        self.model, self.accelerator = trainer.model, trainer.accelerator
        self.mode, self.enable_sleep_mode = "colocate", False
        self._dist = DistributedBackend(trainer.accelerator)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None)


def base_of(model: Any) -> dict[str, torch.Tensor]:
    """The weights under adapters, in float32."""
    return {
        name: w.detach().float().clone() for name, w in model.named_parameters() if name.endswith("base_layer.weight")
    }


def what_adapters_add(model: Any) -> float:
    """The norm of what the adapters add to these weights."""
    layers = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    return sum(layer.get_delta_weight("default").float().square().sum().item() for layer in layers) ** 0.5


def run_arm(name: str, shape: str, dtype: torch.dtype, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train, and tell how far the base is from where it began."""
    forget_accelerate()
    classes: Any = (GRPOTrainer, GRPOConfig) if name == "stock" else (FusedGRPOTrainer, FusedGRPOConfig)
    trainer_class, config_class = classes
    trainer = trainer_class(
        model=make_model(shape, "cpu", dtype, ADAPTERS),
        reward_funcs=reward,
        args=config_class(
            **{**step_options(8, ROWS, GROUP, steps, LENGTHS.longest, "cpu"), "learning_rate": 1e-4, **options}
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * ROWS}),
        processing_class=tokenizer(),
    )
    rollout = Rollout.make(LENGTHS, ROWS // GROUP, GROUP, SHAPES[shape][-1], 0)
    rollout.log_probs = [[-math.log(SHAPES[shape][-1])] * len(ids) for ids in rollout.completions]
    rollout.serve(trainer)
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, 0, NoEngine(trainer)
    before = base_of(trainer.model)
    trainer.train()
    after = base_of(trainer.model)
    count = sum(weight.numel() for weight in before.values())
    norm = sum(weight.square().sum().item() for weight in before.values()) ** 0.5
    moved = sum((after[key] - before[key]).square().sum().item() for key in before) ** 0.5
    changed = sum((after[key] != before[key]).sum().item() for key in before)
    return {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "options": options,
        "steps": steps,
        "changed": changed / count,
        "moved": moved / norm,
        "adapters": what_adapters_add(trainer.model) / norm,
    }


def main(
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}")] = "tiny",
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 100,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare the weights under adapters before and after a training."""
    record: dict[str, Any] = {**environment("cpu", commit), "shape": shape, "results": []}
    keep = {"fused_keep_base_weights": True}
    arms = ("stock", torch.bfloat16, {}), ("ours", torch.bfloat16, keep), ("stock", torch.float32, {})
    for name, dtype, options in arms:
        record["results"].append(run_arm(name, shape, dtype, steps, options))
        typer.echo(record["results"][-1])
        if json_path is not None:
            write_record(json_path, record)


if __name__ == "__main__":
    typer.run(main)
