"""
Two trainings from one seed, by `trainer.train()` with generation: are losses, metrics and weights equal to the bit? On
CUDA both as torch computes by default, where this lists what differs, and under `torch.use_deterministic_algorithms`.

    python benchmarks/determinism.py --device cpu
    python benchmarks/determinism.py --device cuda --json benchmarks/results/determinism-h200.json
"""

import gc
import json
import os
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _measure import environment
from _trainers import LORA_ON_ATTENTION, forget_accelerate, make_model
from datasets import Dataset
from records import write_record
from transformers import PrinterCallback, set_seed
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import EOS_ID, tokenizer


LORA = {"lora": True, "beta": 0.04}
# What each training differs in from the default: where one is not deterministic, the one beside it tells the reason
ARMS: dict[str, dict[str, Any]] = {
    "stock": {"stock": True},
    "stock, LoRA": {"stock": True, **LORA},
    "default": {},
    "a forward for each micro-batch": {"fused_max_tokens_per_forward": 0},
    "prompts not shared": {"fused_share_prompts": False},
    "padded rows": {"fused_layout": "padded"},
    "backward computed again": {"fused_backward": "recompute"},
    "no checkpointing": {"gradient_checkpointing": False},
    "beta": {"beta": 0.04},
    "sequence ratios, two iterations": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "LoRA": LORA,
    "fused_compile": {"fused_compile": True},
    "fused_compile, LoRA": {"fused_compile": True, **LORA},
}
STEPS, MICRO_BATCH, WINDOW, GROUP = 5, 4, 4, 8
_OWN = ("stock", "lora")
_TIMES = ("runtime", "per_second", "step_time")

app = typer.Typer(add_completion=False)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Of lengths and of tokens."""
    return [sum(ids) % 97 / 97 + len(ids) / 50 for ids in completion_ids]


def train(arm: str, size: str, device: str, dtype: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a training logged, without times, and its weights on the CPU."""
    options = dict(ARMS[arm])
    is_stock, with_lora = options.pop("stock", False), options.pop("lora", False)
    forget_accelerate()
    set_seed(11)
    with tempfile.TemporaryDirectory() as folder:
        args = (GRPOConfig if is_stock else FusedGRPOConfig)(
            output_dir=folder,
            max_steps=STEPS,
            learning_rate=1e-3,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=WINDOW,
            num_generations=GROUP,
            max_completion_length=48,
            generation_kwargs={"sequence_bias": [[[EOS_ID], 4.0]]},
            logging_steps=1,
            save_strategy="no",
            use_cpu=device == "cpu",
            bf16=dtype == "bfloat16",
            report_to="none",
            disable_tqdm=True,
            seed=7,
            **options,
        )
        model = make_model(size, device, torch.float32)
        model.save_pretrained(Path(folder) / "model")
        model.config._name_or_path = str(Path(folder) / "model")  # where TRL loads the reference from
        if with_lora:
            model = make_model(size, device, torch.float32, LORA_ON_ATTENTION)
        words = [" ".join(f"w{(7 * i + j) % 900}" for j in range(1 + 5 * i % 23)) for i in range(32)]
        trainer: Any = (GRPOTrainer if is_stock else FusedGRPOTrainer)(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": words}),
            processing_class=tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in trainer.state.log_history
    ]
    weights = {name: value.detach().cpu().clone() for name, value in trainer.model.named_parameters()}
    if hasattr(trainer, "detach"):
        trainer.detach()
    return logs, weights


def compare(arm: str, size: str, device: str, dtype: str) -> dict[str, Any]:
    """Two trainings of an arm: the first metric and parameter that differ, or none."""
    result: dict[str, Any] = {"name": arm, "dtype": dtype}
    try:
        (first_logs, first), (logs, weights) = (train(arm, size, device, dtype) for _ in range(2))
    except RuntimeError as error:
        return {**result, "equal": False, "raises": " ".join(str(error).split())[:300]}
    pairs = list(enumerate(zip(first_logs, logs, strict=True)))
    metrics = [f"{name} in step {i + 1}" for i, (a, b) in pairs for name in a if repr(a[name]) != repr(b[name])]
    differ = [name for name in first if not torch.equal(first[name], weights[name])]
    result |= {"steps": len(first_logs) - 1, "equal": not metrics and not differ}
    if metrics or differ:
        result["first_metric"] = metrics[0] if metrics else None
        result["parameters"] = f"{len(differ)} of {len(first)}"
    gc.collect()
    return result


@contextmanager
def deterministic(warn_only: bool = False) -> Generator[None, None, None]:
    """While it lasts, torch takes deterministic algorithms, or raises."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def what_raises(arm: str, size: str, device: str, dtype: str) -> list[str]:
    """The operations of an arm that have no deterministic algorithm, in torch's words."""
    with warnings.catch_warnings(record=True) as caught, deterministic(warn_only=True):
        warnings.simplefilter("always")
        train(arm, size, device, dtype)
    texts = {" ".join(str(warning.message).split())[:160] for warning in caught}
    return sorted(text for text in texts if "determinis" in text)


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    size: Annotated[str | None, typer.Option(help="of the model, see _trainers.py; tiny on the CPU")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; may be repeated")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="some of the trainings; may be repeated")] = None,
    skip_default: Annotated[
        bool, typer.Option("--skip-default", help="on CUDA, under deterministic ones only")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="for the record, where there is no git")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the record")] = None,
) -> None:
    """Compare trainings with themselves; exit with 1 where one of ours is not as it should be."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
    # In half precision stock's padded rows get NaN gradients from it, and generation raises (nan_gradients.py)
    torch.backends.cuda.enable_cudnn_sdp(False)
    logging.set_verbosity_error()
    on_cuda = device == "cuda"
    size = size or ("small" if on_cuda else "tiny")
    dtypes = dtype or (["float32", "bfloat16"] if on_cuda else ["float32"])
    results, right = [], True
    for each in dtypes:
        for name in arm or ARMS:
            of_arm = {"by default": None if on_cuda and skip_default else compare(name, size, device, each)}
            if on_cuda:
                with deterministic():
                    of_arm["deterministic algorithms"] = compare(name, size, device, each)
            for mode, result in of_arm.items():
                if result is None:
                    continue
                is_judged = "stock" not in ARMS[name] and (not on_cuda or mode != "by default")
                if "raises" in result:
                    result["without_one"] = what_raises(name, size, device, each) if mode != "by default" else []
                right &= result["equal"] or not is_judged
                results.append({**result, "mode": mode, "judged": is_judged})
                typer.echo(json.dumps(results[-1]))
    record = {**environment(device, commit), "size": size, "steps": STEPS, "results": results, "right": right}
    if json_file:
        write_record(json_file, record)
    equal = sum(result["equal"] for result in results)
    typer.echo(f"{equal} of {len(results)} pairs of trainings equal to the bit: {'right' if right else 'WRONG'}")
    raise typer.Exit(not right)


if __name__ == "__main__":
    app()
