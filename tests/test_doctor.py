"""`trl-fused-grpo doctor` tells what a training would do, from configurations alone."""

import json
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from tests.harness.models import save_checkpoint
from trl_fused_grpo.cli import app


@pytest.fixture
def model(tmp_path):
    """A model's folder without weights."""
    folder = save_checkpoint("llama", tmp_path, torch.float32)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    return folder


def doctor(*arguments):
    # Each is a process of its own. transformers 4 leaves the precision in the environment
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def written(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_without_a_model_it_tells_what_is_installed():
    result = doctor("--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["refused"] is None
    assert torch.__version__.startswith(told["versions"]["torch"])  # a build for CUDA adds its own to the version
    assert [line["name"] for line in told["summary"]][:2] == ["versions", "device"]


def test_it_tells_what_a_training_would_do_without_weights_vllm_or_reference(tmp_path, model):
    config = written(
        tmp_path,
        f"model_name_or_path: {model}\nbeta: 0.04\nuse_vllm: true\nbf16: true\nfused_max_tokens_per_forward: 4096\n"
        "gradient_accumulation_steps: 4\nreport_to: wandb\nfsdp: full_shard\nnum_processes: 2\n"
        "accelerate_config: fsdp2\n",  # TRL hands these two on to `accelerate launch`
    )
    result = doctor("--config", config, "--json")
    assert result.exit_code == 0, result.output
    lines = {line["name"]: line["value"] for line in json.loads(result.stdout)["summary"]}
    assert lines["packed rows"].startswith("no padding")
    assert lines["shared forwards"] == "up to 4 micro-batches in one, 4,096 tokens"
    assert lines["FusedGRPOTrainer"].startswith("level window: ")
    assert lines["old log-probs of the training forward"] == "until the weights move"
    assert lines["shared reference forwards"] == "those of the policy"
    assert all("left out" in lines[name] for name in ("fsdp", "num_processes", "accelerate_config"))
    assert not list(model.parent.glob("trainer_output"))


def test_a_table_is_printed_for_a_model_alone(model):
    result = doctor("--model", model)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("FusedGRPOTrainer  level window: fused head, packed rows")
    assert "3 matmuls" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fused_backward: forecast\ntop_entropy_quantile: 0.2\n", "set top_entropy_quantile=1.0"),
        ("kl_estimator: k2\nbeta: 0.1\nuse_liger_loss: false\n", "kl_estimator='k2'"),
        ("fused_layout: dense\n", """fused_layout must be None, "packed" or "padded", not 'dense'."""),
        ("fused_memory: 80%\n", "fused_memory must be None or a fraction above 0 and at most 1, not '80%'."),
    ],
    ids=["options that exclude each other", "with a reference", "a choice", "a number"],
)
def test_what_the_trainer_refuses_is_told_with_its_message(tmp_path, model, text, message):
    result = doctor("--model", model, "--config", written(tmp_path, text))
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) < 30


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nope", "", "the model nope cannot be loaded: "),
        (None, "fused_memry: 0.9\n", "there is no option fused_memry; did you mean fused_memory?"),
        (None, "- a list\n", "has no options: it is no YAML mapping."),
        (None, "a: [\n", "cannot be read: "),
        (None, None, "cannot be read: "),
        (None, "beta: 0.1\n", "no model: give --model"),
    ],
    ids=["model", "key", "list", "YAML", "file", "no model"],
)
def test_what_cannot_be_looked_at_is_one_line_and_another_exit_code(tmp_path, name, text, message):
    words = ["--model", name] if name else []
    if text != "":
        words += ["--config", tmp_path / "gone.yaml" if text is None else written(tmp_path, text)]
    result = doctor(*words)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("trl-fused-grpo doctor: ") and message in line
    assert not result.stdout


def summary_of(*words):
    result = doctor(*words, "--json")
    assert result.exit_code == 0, result.output
    return {line["name"]: line for line in json.loads(result.stdout)["summary"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is there to be described")
def test_a_gpu_that_is_not_here_is_described(tmp_path, model):
    config = written(tmp_path, "fused_memory: 0.9\ngradient_accumulation_steps: 2\n")
    lines = summary_of("--model", model, "--config", config, "--device", "cuda")
    assert lines["setting"]["value"].startswith("cuda (not on this machine), 1 process, float32 under bf16")
    for name, value in (
        ("fast attention", "FlashAttention"),
        ("compiled layers", "one code"),
        ("shared forwards", "90%"),
    ):
        assert value in lines[name]["value"] and lines[name]["reason"] is None
    config = written(tmp_path, "bf16: false\n")
    line = summary_of("--model", model, "--config", config, "--device", "cuda")["fast attention"]
    assert "memory-efficient" in line["value"] and line["change"] == "bf16=True"
    assert summary_of("--model", model)["setting"]["value"].startswith("cpu, ")


def test_attention_that_drops_out_keeps_its_padding(tmp_path):
    folder = save_checkpoint("attention-dropout", tmp_path, torch.float32)
    lines = summary_of("--model", folder)
    assert lines["packed rows"]["value"] == "padded as in TRL"
    assert lines["packed rows"]["reason"] == "its attention drops out"
    result = doctor("--model", folder, "--config", written(tmp_path, "fused_layout: packed\n"))
    assert result.exit_code == 1 and "its attention drops out" in result.output
