"""`trl-fused-grpo doctor` tells what a training would do, from configurations alone."""

import json

import pytest
import torch
from typer.testing import CliRunner

from trl_fused_grpo.cli import app
from trl_fused_grpo.parity.tiny import save_checkpoint


@pytest.fixture
def model(tmp_path):
    """A model's folder without weights."""
    folder = save_checkpoint("llama", tmp_path, torch.float32)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    return folder


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def written(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_without_a_model_it_tells_what_is_installed():
    result = doctor("--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["refused"] is None
    assert told["versions"]["torch"] == torch.__version__
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
    assert "packed" in lines["layout"]
    assert lines["forwards"] == "shared by up to 4 micro-batches, tokens: 4,096"
    assert lines["level"].startswith("window: ")
    assert "from the training forward" in lines["old log-probs"]
    assert lines["reference"] == "in the same forwards as the policy"
    assert all("left out" in lines[name] for name in ("fsdp", "num_processes", "accelerate_config"))
    assert not list(model.parent.glob("trainer_output"))


def test_a_table_is_printed_for_a_model_alone(model):
    result = doctor("--model", model)
    assert result.exit_code == 0, result.output
    assert "3 matmuls, forecast in forward" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fused_backward: forecast\ntop_entropy_quantile: 0.2\n", "set top_entropy_quantile=1.0"),
        ("kl_estimator: k2\nbeta: 0.1\nuse_liger_loss: false\n", "kl_estimator='k2'"),
        ("fused_layout: dense\n", "dense"),
        ("fused_memry: 0.9\n", "fused_memry"),
    ],
    ids=["options that exclude each other", "with a reference", "a value", "a name"],
)
def test_what_the_trainer_refuses_is_told_with_its_message(tmp_path, model, text, message):
    result = doctor("--model", model, "--config", written(tmp_path, text))
    assert result.exit_code == 1
    assert message in result.output
