"""Files of a user who knows TRL alone: a script, a model, a dataset, rewards and a YAML file for `trl grpo`."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from trl_fused_grpo.parity.tiny import tiny_model, tokenizer


OPTIONS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 3,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
}
REWARDS = """
def by_length(completion_ids, **kwargs):
    return [float(len(ids)) + ids[0] % 7 for ids in completion_ids]
"""
SCRIPT = f"""
import json
import sys
from pathlib import Path

from datasets import load_dataset
from rewards import by_length
from trl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=by_length,
        args=GRPOConfig(output_dir=str(folder / "out"), **{OPTIONS!r}),
        train_dataset=load_dataset(str(folder / "data"))["train"],
    )
    trainer.train()
    processes = trainer.accelerator.num_processes
    told = {{"log": trainer.state.log_history, "class": type(trainer).__name__, "processes": processes}}
    if trainer.accelerator.is_main_process:
        (folder / sys.argv[2]).write_text(json.dumps(told))
"""


def write_files(folder: Path) -> Path:
    """Write the files into a folder; the path of the script."""
    tiny_model("llama").save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}).to_json(str(folder / "data" / "train.jsonl"))
    (folder / "rewards.py").write_text(REWARDS)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def write_yaml(folder: Path, **options) -> Path:
    """Write a YAML file for `trl grpo`, which saves its log with the last step; JSON is YAML too."""
    file = folder / "grpo.yaml"
    own = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "data"),
        "reward_funcs": ["rewards.by_length"],
        "output_dir": str(folder / "out"),
        **OPTIONS,
        "save_strategy": "steps",
        "save_steps": OPTIONS["max_steps"],
        "save_only_model": True,
    }
    file.write_text(json.dumps({**own, **options}, indent=1))
    return file


def told_by(folder: Path, name: str) -> dict:
    """What the script has written."""
    return json.loads((folder / name).read_text())


def assert_stock(told: dict) -> None:
    """Whether TRL has trained alone."""
    assert told["class"] == "GRPOTrainer"
    assert_own_loss(told["log"])


def assert_own_loss(log: list[dict]) -> None:
    """Whether a log has no metric of the fused trainer."""
    assert not any(name.startswith("fused/") for entry in log for name in entry)


def assert_fused_and_equal(log: list[dict], stock: list[dict], rounded: bool = False) -> None:
    """
    Whether a log has stock's losses and gradient norms, and the metrics of the fused trainer.

    Args:
        log (`list[dict]`): of the fused training.
        stock (`list[dict]`): of TRL's own.
        rounded (`bool`, *optional*, defaults to `False`): whether losses have four decimals, as transformers 4 logs.
    """
    steps, expected = ([entry for entry in one if "loss" in entry] for one in (log, stock))
    assert len(steps) == len(expected) == OPTIONS["max_steps"]
    for step, own in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(own["loss"], rel=1e-5, abs=1e-4 if rounded else 1e-6)
        assert step["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-5)
        assert step["fused/rows_recomputed"] == 0.0
    assert abs(expected[1]["loss"]) > 0.01  # off-policy: a loss that says something
