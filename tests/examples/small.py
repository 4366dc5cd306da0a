"""A tiny model, tokenizer and dataset in folders, and the options with which a recipe trains on them in seconds."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
import trl
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2
# What a recipe leaves to its defaults, which want a GPU
OPTIONS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "bf16": "false",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": "true",
    "max_grad_norm": 1e6,  # the norm is logged, the gradients stay as they are
}
TOLERANCE = 1e-5  # relative, float32
SAME = ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens", "completions/mean_length")


def arguments(folder: Path, **options: Any) -> list[str]:
    """The words of a command line with these options beside the small ones."""
    named = {"output_dir": folder / "out", **OPTIONS, **options}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def load(name: str) -> ModuleType:
    """A script of `examples/`, imported anew."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on the standard library's own source, with Qwen3's chat template."""
    bpe = ByteLevelBPETokenizer()
    words = ["<pad>", "<eos>", "<image>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    bpe.train_from_iterator([inspect.getsource(module) for module in (ast, inspect)], 512, special_tokens=words)
    # what stays in the text of a completion is no special token
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=template.read_text(encoding="utf-8"),
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder: Path) -> Path:
    """A two-layer Qwen3 and its tokenizer."""
    config = _text_config(save_tokenizer(folder))
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _text_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


_SEES = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_model_with_images(folder: Path) -> Path:
    """A LLaVA of two layers with a vision tower of one, and its processor: an image has 16 tokens."""
    from transformers import CLIPImageProcessorPil  # older releases have it not; tests are skipped there

    tokenizer = save_tokenizer(folder)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        projection_dim=32,
    )
    config = LlavaConfig(
        text_config=_text_config(tokenizer),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-1,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_SEES,
    )
    processor.save_pretrained(folder)
    return folder


def save_problems(folder: Path) -> Path:
    """Sums, in the columns of trl-lib/DeepMath-103K."""
    folder.mkdir(exist_ok=True)
    prompts = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(16)]
    rows = [{"prompt": prompt, "solution": str(2 * i)} for i, prompt in enumerate(prompts)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def save_prompts(folder: Path) -> Path:
    """Prompts that are plain text."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"def function_{i}(argument):"} for i in range(16)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def logs_of(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """What the trainer logged at each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_same(
    fused: list[dict[str, float]], stock: list[dict[str, float]], tolerance: float = TOLERANCE, steps: int = STEPS
) -> None:
    """What our trainer logged is what stock's did, and it has trained."""
    assert [entry["step"] for entry in fused] == list(range(1, steps + 1))
    for mine, other in zip(fused, stock, strict=True):
        assert mine["grad_norm"] > 0
        assert mine["fused/rows_recomputed"] == 0.0
        assert "fused/rows_recomputed" not in other
        for key in SAME:
            assert math.isfinite(mine[key])
            assert mine[key] == pytest.approx(other[key], rel=tolerance, abs=1e-6), key
