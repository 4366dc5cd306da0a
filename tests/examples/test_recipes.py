"""Each recipe of one process, on a tiny model: it trains, and stock TRL, or dense logits, in its place do the same."""

import json
import math

import pytest
import torch
import transformers
import trl

from tests.grpo_oracle import grpo_loss
from trl_fused_grpo import FusedGRPOTrainer, FusedLinearGRPOLoss
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL

from . import small


pytestmark = [
    pytest.mark.example,
    pytest.mark.skipif(TRL < NEWEST_TRL, reason="examples are written for the newest TRL"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    return {
        "model": small.save_model(folder / "model"),
        "model with images": small.save_model_with_images(folder / "model-with-images"),
        "problems": small.save_problems(folder / "problems"),
    }


def logs_of_both(name, monkeypatch, tmp_path, **options):
    """What the recipe logs, and what it logs with stock's trainer in the place of ours; then our trainer."""
    recipe = small.load(name)
    words = small.arguments(tmp_path, use_cpu="true", **options)
    fused = recipe.main(words)
    assert isinstance(fused, FusedGRPOTrainer)
    monkeypatch.setattr(recipe, "FusedGRPOTrainer", trl.GRPOTrainer)
    stock = recipe.main(words)
    assert type(stock) is trl.GRPOTrainer
    return small.logs_of(fused), small.logs_of(stock), fused


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"lora": "true"}], ids=["all weights", "LoRA"])
def test_training_on_text(options, folders, monkeypatch, tmp_path):
    folder = {"model": folders["model"], "dataset": folders["problems"]}
    fused, stock, trainer = logs_of_both("train_text", monkeypatch, tmp_path, **folder, **options)
    small.assert_same(fused, stock)
    assert trainer.fused_layout() == "packed"
    saved = "adapter_model.safetensors" if options else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


def test_training_on_text_over_four_bits(folders, monkeypatch, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = {"model": folders["model"], "dataset": folders["problems"]}
    fused, stock, trainer = logs_of_both("train_text", monkeypatch, tmp_path, **folder, qlora="true")
    # TRL casts adapters over a quantized model to bfloat16: their gradients, and so the norm, have its precision
    small.assert_same(fused, stock, tolerance=torch.finfo(torch.bfloat16).eps)
    quantized = [module for module in trainer.model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(quantized) == 2 * 7
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters() if parameter.requires_grad)


def test_rewards_of_training_on_text():
    recipe = small.load("train_text")
    completions = [[{"role": "assistant", "content": text}] for text in ("4\nIt is 12.", "12\nor 4", "")]
    assert recipe.right_answer(completions=completions, solution=["12"] * 3, prompts=[]) == [1.0, 0.0, 0.0]
    assert recipe.brevity(completions=completions) == pytest.approx([-1.1e-3, -7e-4, 0.0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", ["false", "true"], ids=["all weights", "LoRA"])
def test_training_with_images(lora, folders, monkeypatch, tmp_path):
    model = folders["model with images"]
    fused, stock, trainer = logs_of_both("train_images", monkeypatch, tmp_path, model=model, images=16, lora=lora)
    small.assert_same(fused, stock)
    assert trainer.fused_layout() == "packed"
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert any("vision" in name for name in trained) == (lora == "false")


def call_the_tool(generate):
    """A `generate` whose first two rows begin with a call of the tool, when the prompts have no tool's result yet."""

    def scripted(self, *args, **kwargs):
        ids = generate(self, *args, **kwargs)  # [B, prompt + completion]
        width = kwargs["input_ids"].shape[1]
        tokenizer = call_the_tool.tokenizer
        if len(ids) < 4:  # the rows that called it, and go on
            return ids
        for row, (a, b) in enumerate([(12, 3), (4, 5)]):
            call = {"name": "multiply", "arguments": {"a": a, "b": b}}
            words = tokenizer(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>").input_ids
            ids[row, width : width + len(words)] = torch.tensor(words)
            ids[row, width + len(words) :] = tokenizer.pad_token_id
        return ids

    return scripted


@pytest.mark.nightly
def test_training_with_tools(folders, monkeypatch, tmp_path):
    """A random model calls no tool, so the calls are written into what it generates; all else is TRL's."""
    call_the_tool.tokenizer = transformers.AutoTokenizer.from_pretrained(folders["model"])
    model_class = transformers.Qwen3ForCausalLM
    monkeypatch.setattr(model_class, "generate", call_the_tool(model_class.generate))
    options = {"model": folders["model"], "products": 16, "max_completion_length": 160}
    fused, stock, trainer = logs_of_both("train_tools", monkeypatch, tmp_path, **options)
    small.assert_same(fused, stock)
    for entry in fused:
        assert entry["tools/call_frequency"] == 0.5
        assert entry["tools/failure_frequency"] == 0.0
    # what the tool returned is no row of the head
    assert trainer.fused_stats.rows == 4 * fused[-1]["completions/mean_length"]


def test_rewards_of_training_with_tools():
    recipe = small.load("train_tools")
    answer = {"role": "assistant", "content": "It is 6."}
    called = [{"role": "assistant", "content": ""}, {"role": "tool", "name": "multiply", "content": "6"}, answer]
    assert recipe.right_product(completions=[called, [answer], [called[0]]], product=[6] * 3) == [1.2, 1.0, 0.0]
    assert recipe.multiply(3, 4) == 12


def test_a_loop_of_its_own_trains_what_dense_logits_do(folders, monkeypatch, capsys):
    recipe, clip = small.load("custom_loop"), torch.nn.utils.clip_grad_norm_
    calls, states = [], []

    class Recording(FusedLinearGRPOLoss):
        def forward(self, hidden, head, *tensors, **options):
            calls.append([tensor.detach().clone() for tensor in (hidden, head.weight, *tensors)])
            return super().forward(hidden, head, *tensors, **options)

    def recording_clip(parameters, norm):
        parameters = list(parameters)
        states.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
        return clip(parameters, norm)

    monkeypatch.setattr(recipe, "FusedLinearGRPOLoss", Recording)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recording_clip)
    log = recipe.main(model=str(folders["model"]), steps=2, group=4, new_tokens=8, learning_rate=1e-3)
    assert all(math.isfinite(value) for entry in log for value in entry.values())
    assert all(entry["grad_norm"] > 0 for entry in log)
    assert len(capsys.readouterr().out.splitlines()) == 2

    read = transformers.AutoTokenizer.from_pretrained(folders["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["model"])
    for prompt, entry, (hidden, head, tokens, mask, advantages), state in zip(
        recipe.PROMPTS, log, calls, states, strict=False
    ):
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert mask.any(1).all()
        weights, gradients = zip(*state, strict=True)
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        ids = torch.cat([read(prompt, return_tensors="pt").input_ids.expand(4, -1), tokens], dim=1)
        logits = model(ids).logits[:, -tokens.shape[1] - 1 : -1]
        own = mask.unsqueeze(-1)
        torch.testing.assert_close(hidden @ head.T * own, logits.detach() * own, rtol=1e-5, atol=1e-6)
        logps = logits.double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        loss, _ = grpo_loss({"loss_type": "dapo"}, logps, mask, advantages)
        dense = torch.autograd.grad(loss, list(model.parameters()))
        assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        for found, expected in zip(gradients, dense, strict=True):
            assert (found - expected).norm() < 1e-5 * entry["grad_norm"]


def test_a_loop_of_its_own_masks_what_follows_the_end():
    mask = small.load("custom_loop").ends_with_eos(torch.tensor([[5, 1, 1, 1], [5, 6, 7, 8]]), eos=1)
    assert mask.tolist() == [[True, True, False, False], [True] * 4]
